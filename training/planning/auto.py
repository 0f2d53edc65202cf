"""`parallel: auto`: the planner's choice becomes the layout of the settings.

settings = prepare(settings, "tiny")        # what cluster.submit and Snakemake call before anything else
settings = resolve(settings, "tiny", machine, processes=8)
"""

from common.config import load_settings
from common.console import note
from common.errors import ConfigError, ToolkitError
from common.settings import Experiment, Settings
from training.model_folder import newest_iteration
from training.planning.check import check_fits, gib, predict, question_of
from training.planning.check import processes as count
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.search import fewest_gpus, search, smallest
from training.planning.table import short
from training.planning.this_machine import judges_this_machine, machine_of_job, processes_of
from training.planning.workload import Workload


def prepare(settings: Settings, name: str) -> Settings:
    """The settings of a job to be submitted: its layout chosen, and its memory checked.

    Where only the job can know its machine, nothing is checked, and `auto` stays: the job does both when it starts.
    Raises ConfigError, also for a model that is too large.
    """
    experiment, cluster = settings.models[name], settings.cluster_of(name)
    machine = machine_of_job(experiment, cluster)
    if machine is None:
        return settings
    settings = resolve(settings, name, machine, processes_of(experiment, cluster))
    done = newest_iteration(settings.model_folder(name))
    check_fits(settings, name, machine, done=done, here=judges_this_machine(cluster))
    return settings


def resolve(settings: Settings, name: str, machine: Machine, processes: int) -> Settings:
    """The settings with a layout for `processes` instead of `parallel: auto`; others stay as they are.

    A layout for as many processes in MODEL/settings.yaml is kept, so that a run that resumes goes on as it began.
    Raises ConfigError if no layout fits.
    """
    experiment = settings.models[name]
    if not experiment.parallel.auto:
        return settings
    earlier = _earlier(settings, name)
    kept = _kept(earlier, experiment, machine, processes) if earlier else None
    chosen = kept or _best(experiment, name, machine, processes).apply(experiment)
    how = f"as in {settings.model_folder(name) / 'settings.yaml'}" if kept else "chosen by the planner"
    if earlier and not kept:
        how += f"; the run had {earlier.parallel.factors}"
    note(f"models.{name}.parallel: {short(Layout.of(chosen))} on {count(processes, machine.device)}, {how}")
    return settings.model_copy(update={"models": {**settings.models, name: chosen}})


def _earlier(settings: Settings, name: str) -> Experiment | None:
    """The experiment that the model folder's last run had, if it can be read."""
    path = settings.model_folder(name) / "settings.yaml"
    try:
        return load_settings(path).models.get(name) if path.exists() else None
    except ToolkitError:  # of another version of the toolkit
        return None


def _kept(earlier: Experiment, experiment: Experiment, machine: Machine, processes: int) -> Experiment | None:
    """The experiment in the layout that it had, if that is one for as many processes and the same batch, and fits."""
    old, new = earlier.train, experiment.train
    same_batch = old.global_batch_size == new.global_batch_size
    same_micro_batch = new.micro_batch_size in (0, old.micro_batch_size)
    if earlier.parallel.auto or earlier.world_size != processes or not same_batch or not same_micro_batch:
        return None
    try:
        kept = Layout.of(earlier).apply(experiment)
    except ValueError:  # the model is another one
        return None
    return kept if predict(kept, machine).fits or new.allow_tight else None


def _best(experiment: Experiment, name: str, machine: Machine, processes: int) -> Layout:
    """The planner's first choice. Raises ConfigError if nothing fits."""
    workload, question = Workload.of(experiment, machine), question_of(experiment, processes)
    if found := search(workload, machine, question):
        return found[0].layout
    least = smallest(workload, machine, question)
    where = f"models.{name}.parallel: auto"
    if least is None:
        raise ConfigError(
            f"{where}: no layout of {count(processes, machine.device)} takes train.global_batch_size "
            f"{question.global_batch_size}; choose a multiple of {processes}"
        )
    if experiment.train.allow_tight:
        return least.layout
    enough = fewest_gpus(workload, machine, question)
    cure = f"parallel.gpus={enough} would do" if enough else "nor on more"
    raise ConfigError(
        f"{where}: nothing fits on {count(processes, machine.device)}: {gib(least.memory_bytes)} GiB each at least, of "
        f"{gib(machine.memory)}; {cure}, or set train.allow_tight=true to start anyway"
    )
