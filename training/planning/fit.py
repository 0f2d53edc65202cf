"""Checks that a training fits its machine, and replaces `parallel: auto` by the planner's choice.

settings = prepare(settings, "tiny")     # called before a job is submitted
settings = resolve(settings, "tiny", machine, count=8)
check_fits(settings, "tiny", machine)    # ConfigError in one line, with what would fit
"""

from collections.abc import Iterator
from pathlib import Path

from common.config import load_settings
from common.console import note
from common.errors import ConfigError, ToolkitError
from common.settings import Experiment, Settings
from training.model_folder import newest_iteration
from training.planning.elastic import extremes, process_counts
from training.planning.layout import Layout, PlanRequest, Workload, by_part
from training.planning.machines import GIB, Machine, judges_this_machine, machine_of_job, processes_of
from training.planning.search import Prediction, fewest_gpus, predict, search, smallest


def prepare(settings: Settings, name: str) -> Settings:
    """Choose the layout of a job before it is submitted and check its memory: the new settings.

    If only the job can know its machine, it does both when it starts, and nothing changes here.
    Raises ConfigError, also for a model that is too large.
    """
    experiment, cluster = settings.models[name], settings.cluster_of(name)
    machine = machine_of_job(experiment, cluster)
    if machine is None:
        process_counts(name, experiment, cluster)
        return settings
    settings = resolve(settings, name, machine, processes_of(experiment, cluster))
    done = newest_iteration(settings.model_folder(name))
    counts = process_counts(name, settings.models[name], cluster)
    for start in extremes(settings, name, counts, machine):
        check_fits(start, name, machine, done=done, here=judges_this_machine(cluster))
    return settings


def check_fits(settings: Settings, name: str, machine: Machine, *, done: int = 0, here: bool = False) -> None:
    """Raise ConfigError if the model `name` is too large for the memory of its machine.

    `done`: iterations of its newest checkpoint. `here`: the machine is this one.
    `train.allow_tight` turns the error into a note. `training.job` checks whether CPUs are too
    slow.
    """
    experiment = settings.models[name]
    prediction = predict(experiment, machine)
    if done >= experiment.train.iterations or prediction.verdict == "feasible":
        return
    problem = f"models.{name} {_needs(prediction)}"
    if not prediction.fits and not experiment.train.allow_tight:
        request = PlanRequest(prediction.layout.world_size, experiment.train.global_batch_size)
        ways = [*_ways(prediction, request, here), "set train.allow_tight=true to start anyway"]
        raise ConfigError(f"{problem}; {', or '.join(ways)}")
    note(f"{problem}{', which is tight' * prediction.fits}")


def does_not_fit(given: Prediction, request: PlanRequest) -> str:
    """Why a layout does not fit, and the fastest layout that does."""
    return f"the layout {given.layout} {_needs(given)}; {', or '.join(_ways(given, request))}"


def nothing_fits(workload: Workload, machine: Machine, request: PlanRequest) -> str:
    """Why `search` found nothing."""
    count = processes(request.gpus, machine.device)
    least = smallest(workload, machine, request)
    if least is None:
        micro = f" in micro-batches of {request.micro_batch_size}" * bool(request.micro_batch_size)
        return (
            f"no layout of {count} takes {request.global_batch_size} samples per step"
            f"{micro}; change their number, or the global batch size to a multiple of it"
        )
    enough = fewest_gpus(workload, machine, request)
    cure = f"{processes(enough, machine.device)} would do" if enough else "nor on more"
    return f"nothing fits on {count}: even {least.layout} {_needs(least)}; {cure}"


def _needs(prediction: Prediction) -> str:
    """`needs 93.1 GiB per GPU and there are 79.2 (the largest part: activations, 61.0)`."""
    machine, count, where = prediction.machine, 1, "per GPU"
    part, value = max(by_part(prediction.memory).items(), key=lambda item: item[1])
    if machine.device == "cpu":
        count = min(prediction.layout.world_size, machine.per_node)
        where = f"in {processes(count, machine.device)}"
    largest = f"the largest part{' of each' if count > 1 else ''}: {part}, {gib(value)}"
    return (
        f"needs {gib(count * prediction.own_bytes)} GiB {where} and there are {gib(count * machine.memory)} ({largest})"
    )


def _ways(given: Prediction, request: PlanRequest, here: bool = False) -> Iterator[str]:
    """Changes that make the training fit: another layout, or more GPUs."""
    machine, on_cpu = given.machine, given.machine.device == "cpu"
    if fitting := search(given.workload, machine, request):
        best = fitting[0]
        needed = best.memory_bytes * (best.layout.world_size if on_cpu else 1)
        yield f"set {_changed_keys(given.layout, best.layout)} to need {gib(needed)}"
    elif on_cpu and here:
        yield "train a smaller model, or on GPUs"
    elif enough := fewest_gpus(given.workload, machine, request):
        yield f"no layout of {processes(request.gpus, machine.device)} fits, {enough} would do"
    else:
        yield "no layout fits on any number of them"
    if on_cpu and not here:
        yield "raise cluster.mem_gb_per_task"


def _changed_keys(given: Layout, other: Layout) -> str:
    """The keys in which `other` differs, as on a command line: `parallel.zero_stage=1 …`."""
    sections = dict.fromkeys(("micro_batch_size", "accumulation", "recompute"), "train")
    return " ".join(
        f"{sections.get(key, 'parallel')}.{key}={str(after).lower()}"
        for (key, after), before in zip(other._asdict().items(), given, strict=True)
        if after != before
    )


def resolve(settings: Settings, name: str, machine: Machine, count: int) -> Settings:
    """Replace `parallel: auto` by a layout for `count` processes; returns the new settings.

    A resumed run keeps the layout of MODEL/settings.yaml if that has as many processes. Raises
    ConfigError if no layout fits.
    """
    experiment = settings.models[name]
    if not experiment.parallel.auto:
        return settings
    path = settings.model_folder(name) / "settings.yaml"
    kept = _kept(path, name, experiment, machine, count)
    chosen = kept or _best(experiment, name, machine, count).apply(experiment)
    how = f"as in {path}" if kept else "chosen by the planner"
    note(f"models.{name}.parallel: {Layout.of(chosen)} on {processes(count, machine.device)}, {how}")
    return settings.model_copy(update={"models": {**settings.models, name: chosen}})


def _kept(path: Path, name: str, experiment: Experiment, machine: Machine, count: int) -> Experiment | None:
    """The experiment in the layout of `path`, if that has the same size and batch, and fits."""
    try:
        earlier = load_settings(path).models[name] if path.exists() else experiment
        old, new = earlier.train, experiment.train
        same_batch = old.global_batch_size == new.global_batch_size
        same_batch &= new.micro_batch_size in (0, old.micro_batch_size)
        if earlier.parallel.auto or earlier.world_size != count or not same_batch:
            return None
        kept = Layout.of(earlier).apply(experiment)
    except (ToolkitError, KeyError, ValueError):  # a damaged file, or another model
        return None
    return kept if predict(kept, machine).fits or new.allow_tight else None


def _best(experiment: Experiment, name: str, machine: Machine, count: int) -> Layout:
    """The planner's first choice. Raises ConfigError if nothing fits."""
    workload, train = Workload.of(experiment, machine), experiment.train
    request = PlanRequest(count, train.global_batch_size, micro_batch_size=train.micro_batch_size)
    if fitting := search(workload, machine, request):
        return fitting[0].layout
    least = smallest(workload, machine, request)
    if least is not None and train.allow_tight:
        return least.layout
    anyway = "" if least is None else ", or set train.allow_tight=true to start anyway"
    raise ConfigError(f"models.{name}.parallel: auto: {nothing_fits(workload, machine, request)}{anyway}")


def processes(count: int, device: str) -> str:
    """`8 GPUs`, or `1 process` on CPUs."""
    if device == "cpu":
        return f"{count} process{'es' * (count != 1)}"
    return f"{count} GPU{'s' * (count != 1)}"


def gib(value: float) -> str:
    """Bytes in GiB, with one decimal; two digits below 1."""
    return f"{value / GIB:.1f}" if value >= GIB else f"{value / GIB:.2g}"
