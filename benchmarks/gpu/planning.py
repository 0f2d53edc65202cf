"""The planner's predictions beside measured steps: the peak of the memory, and the time of a step.

Each row is a probe (training.probe): the trainer's model and step on random tokens, two steps to warm up and 5 that are
timed. Memory is all that the process takes from the GPU. An error is predicted minus measured, in per cent of measured.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.gpu.items import Context, Item, Row
from benchmarks.gpu.steps import Variant, clean_up, drawn_on, enable_attention, job_of

TITLE = "The planner: predicted and measured memory and time of a step on one GPU"

_STEPS = 5


class Case(NamedTuple):
    """A row of the table."""

    size: str
    micro: int
    dropout: float
    recompute: str

    @property
    def name(self) -> str:
        """`345m, micro-batch 16, dropout 0.1, recompute full`."""
        return f"{self.size}, micro-batch {self.micro}, dropout {self.dropout:g}, recompute {self.recompute}"

    @property
    def seconds(self) -> float:
        """A guess of how long the row takes: most of it is compilation."""
        return {"124m": 20, "345m": 30, "1.5b": 60}[self.size]


def _cases() -> list[Case]:
    """All rows, the most informative first."""
    first = [Case("345m", 16, 0.1, recompute) for recompute in ("none", "full", "selective")]
    first += [Case("124m", 16, 0.0, "none"), Case("1.5b", 8, 0.0, "none"), Case("345m", 16, 0.0, "none")]
    grid = [
        Case(size, micro, dropout, recompute)
        for size in ("345m", "124m")
        for micro in (8, 16)
        for dropout in (0.0, 0.1)
        for recompute in ("none", "selective", "full")
    ]
    large = [Case("1.5b", micro, 0.0, recompute) for micro in (8, 16) for recompute in ("none", "selective", "full")]
    return list(dict.fromkeys([*first, *grid, *large]))


CASES = {case.name: case for case in _cases()}


def items(toy: bool) -> list[Item]:
    """An item per row; a rehearsal needs no more than the recompute modes, because all its sizes are the same."""
    return [
        Item("planning", name, case.seconds)
        for name, case in CASES.items()
        if not toy or (case.size, case.dropout) == ("345m", 0.1)
    ]


def run(item: Item, context: Context) -> Iterator[Row]:
    """The row of a case."""
    import torch

    from training.kernels import library
    from training.operations import choose_operations
    from training.parallel.launch import read_launch
    from training.parallel.process_group import started
    from training.planning.check import predict
    from training.planning.comparison import Figures, error_percent
    from training.probe import measure
    from training.run_plan import machine_of_device

    case, launch = CASES[item.name], read_launch()
    device = torch.device("cuda" if context.gpu else "cpu")
    changed: dict[str, Any] = {"recompute": case.recompute}
    job = job_of(Variant(case.size, case.micro, dropout=case.dropout, train=changed), context)
    experiment = job.settings.models["step"]
    try:
        with started(launch, job.folder) as world, patch("training.parallel.layout.initial_value", drawn_on(device)):
            choose_operations(experiment, world, job.folder)
            prediction = predict(experiment, machine_of_device(device, launch, job.settings.cluster))
            measured = Figures.measured(*measure(experiment, world, _STEPS), prediction)
    finally:
        enable_attention()
        library.select(())
        clean_up()
    predicted = Figures.predicted(prediction)
    yield {
        "size": case.size,
        "micro": case.micro,
        "dropout": case.dropout,
        "recompute": case.recompute,
        "device": device.type,
        "predicted GB": predicted.memory / 1e9,
        "measured GB": measured.memory / 1e9,
        "memory error %": error_percent(predicted.memory, measured.memory),
        "predicted tensors GB": (predicted.memory - predicted.context) / 1e9,
        "measured tensors GB": (measured.memory - measured.context) / 1e9,
        "predicted ms": 1000 * predicted.step_seconds,
        "measured ms": 1000 * measured.step_seconds,
        "time error %": error_percent(predicted.step_seconds, measured.step_seconds),
        "MFU %": 100 * measured.mfu,
    }
