"""Whether a training fits the memory of its machine. Asked before anything is queued or built.

check_fits(settings, "tiny", machine)       # ConfigError in one line, with what would fit
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from common.console import note
from common.errors import ConfigError
from common.settings import Experiment, Settings
from training.planning.layout import Layout
from training.planning.machines import GIB, Machine
from training.planning.memory import FEASIBLE, TIGHT
from training.planning.refusal import changed_keys
from training.planning.search import Prediction, Question, fewest_gpus, nearest
from training.planning.terms import by_part
from training.planning.this_machine import this_cpu
from training.planning.workload import Workload


def predict(experiment: Experiment, machine: Machine) -> Prediction:
    """What an experiment takes on a machine, in its layout."""
    return Prediction(Workload.of(experiment, machine), Layout.of(experiment), machine)


def question_of(experiment: Experiment, gpus: int, *, any_micro_batch: bool = False) -> Question:
    """The layouts that train the same on a number of GPUs."""
    train = experiment.train
    return Question(gpus, train.global_batch_size, micro_batch_size=0 if any_micro_batch else train.micro_batch_size)


def check_fits(settings: Settings, name: str, machine: Machine, *, done: int = 0, here: bool = False) -> None:
    """Raise ConfigError if the model `name` is too large for the memory of its machine.

    `done`: iterations of its newest checkpoint. `here`: the machine is this one. `train.allow_tight` turns the error
    into a note. What is too slow for CPUs is seen when it trains (`training.trainer`).
    """
    experiment = settings.models[name]
    check = _Check(predict(experiment, machine))
    if done >= experiment.train.iterations or not check.tight:
        return
    problem = f"models.{name} {check.memory_text}"
    if check.too_large and not experiment.train.allow_tight:
        ways = [*_layouts(check.prediction, experiment, here), "set train.allow_tight=true to start anyway"]
        raise ConfigError(f"{problem}; {', or '.join(ways)}")
    note(f"{problem}{', which is tight' * (not check.too_large)}")


def predicted_rows(experiment: Experiment, machine: Machine, iterations: int) -> dict[str, str]:
    """The rows of a run's plan: memory per process, and the time of `iterations`."""
    prediction = predict(experiment, machine)
    parts = ", ".join(f"{part} {gib(value)}" for part, value in by_part(prediction.memory).items() if value)
    unit = "process" if machine.device == "cpu" else "GPU"
    rows = {"memory": f"predicted {gib(prediction.memory_bytes)} GiB of {gib(machine.memory)} per {unit}: {parts}"}
    rows["time"] = "not predicted"
    if machine.timed:
        total = duration(iterations * prediction.step_seconds)
        speed = f"{prediction.tokens_per_second:,.0f} tokens per second, MFU {prediction.mfu:.0%}"
        rows["time"] = f"predicted {total} at {speed}{', uncalibrated' * bool(prediction.uncalibrated)}"
    return rows


def predicted_figures(experiment: Experiment, machine: Machine) -> dict[str, Any]:
    """What `predicted_rows` says, as plain data: bytes per process by part, seconds and speed of the whole run."""
    prediction = predict(experiment, machine)
    found: dict[str, Any] = {
        "memory": {part: round(value) for part, value in by_part(prediction.memory).items() if value},
        "memory_bytes": round(prediction.memory_bytes),
        "machine_bytes": machine.memory,
    }
    if machine.timed:
        found["seconds"] = experiment.train.iterations * prediction.step_seconds
        found["tokens_per_second"] = prediction.tokens_per_second
    return found


@dataclass(frozen=True)
class _Check:
    """A prediction, and how it compares with the machine."""

    prediction: Prediction

    @property
    def bytes(self) -> float:
        """Per process; on CPUs without the libraries, of which all processes share one copy: no false alarms."""
        parts = by_part(self.prediction.memory)
        return self.prediction.memory_bytes - (parts.get("context", 0) if self.on_cpu else 0)

    @property
    def on_cpu(self) -> bool:
        return self.prediction.machine.device == "cpu"

    @property
    def too_large(self) -> bool:
        return self.bytes >= self.prediction.machine.memory * (1 if self.on_cpu else TIGHT)

    @property
    def tight(self) -> bool:
        return self.bytes >= self.prediction.machine.memory * FEASIBLE

    @property
    def memory_text(self) -> str:
        """`needs 93.1 GiB per GPU and there are 79.2 (the largest part: activations, 61.0)`."""
        machine, layout = self.prediction.machine, self.prediction.layout
        part, value = max(by_part(self.prediction.memory).items(), key=lambda item: item[1])
        count, where = 1, "per GPU"
        if self.on_cpu:
            count = min(layout.world_size, machine.per_node)
            where = f"in {processes(count, machine.device)}"
        largest = f"the largest part{' of each' if count > 1 else ''}: {part}, {gib(value)}"
        return f"needs {gib(count * self.bytes)} GiB {where} and there are {gib(count * machine.memory)} ({largest})"


def _layouts(given: Prediction, experiment: Experiment, here: bool) -> Iterator[str]:
    """What to change so that the memory suffices: the nearest layout, or the number of GPUs."""
    gpus, machine, on_cpu = given.layout.world_size, given.machine, given.machine.device == "cpu"
    question = question_of(experiment, gpus, any_micro_batch=True)
    found = nearest(given, question)
    if found is None and on_cpu and here and gpus > 1:  # more processes would not have more memory
        alone = replace(given, machine=this_cpu(1))
        found = nearest(alone, replace(question, gpus=1))
    if found is not None:
        needed = found.memory_bytes * (found.layout.world_size if on_cpu else 1)
        yield f"set {changed_keys(given, found)} to need {gib(needed)}"
    elif on_cpu and here:
        yield "train a smaller model, or on GPUs"
    elif enough := fewest_gpus(given.workload, machine, question):
        yield f"no layout of {processes(gpus, machine.device)} fits, {enough} would do"
    else:
        yield "no layout fits on any number of them"
    if on_cpu and not here:
        yield "raise cluster.mem_gb_per_task"


def processes(count: int, device: str) -> str:
    """`8 GPUs`, or `1 process` on CPUs."""
    if device == "cpu":
        return f"{count} process{'es' * (count != 1)}"
    return f"{count} GPU{'s' * (count != 1)}"


def gib(value: float) -> str:
    """Bytes in GiB, with one decimal; two digits below 1."""
    return f"{value / GIB:.1f}" if value >= GIB else f"{value / GIB:.2g}"


def duration(seconds: float) -> str:
    """`about 41 years`."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:,.0f} {unit}"
    return f"about {max(1, round(seconds))} s"
