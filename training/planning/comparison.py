"""What the planner predicts of a layout, beside what a few steps of it took.

predicted, measured = Figures.predicted(prediction), Figures.measured(memory, seconds, prediction)
print(table(predicted, measured))
"""

from math import isnan, nan
from typing import NamedTuple, Self

from common.tables import readable_bytes, text_table
from training.planning.machines import UNKNOWN, Machine
from training.planning.search import Prediction
from training.planning.terms import by_part

MEMORY_GOAL, TIME_GOAL = 10.0, 15.0  # per cent, on GPUs


class Figures(NamedTuple):
    """Bytes of the fullest process at its peak; seconds of a step, and speeds of all processes together."""

    parameters: float
    optimizer: float
    """The optimiser's state."""
    transient: float
    """Everything else that tensors take at the peak: gradients, activations, logits and loss, communication."""
    context: float
    """What the process takes from its device beside tensors: the context, libraries, and what the allocator holds."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """The share of the peak that the model's work takes."""

    @property
    def memory(self) -> float:
        """Everything that the process takes from its device."""
        return self.parameters + self.optimizer + self.transient + self.context

    @classmethod
    def predicted(cls, prediction: Prediction) -> Self:
        """The planner's."""
        parts = by_part(prediction.memory)
        alone = [parts.pop(part, 0.0) for part in ("parameters", "optimizer", "context")]
        parameters, optimizer, context = alone
        speed = (prediction.step_seconds, prediction.tokens_per_second, prediction.mfu)
        if prediction.machine.device == "cpu":
            speed = (nan, nan, nan)  # not predicted
        return cls(parameters, optimizer, sum(parts.values()), context, *speed)

    @classmethod
    def measured(cls, memory: tuple[float, float, float, float], step_seconds: float, of: Prediction) -> Self:
        """Of a step in the layout of `of`: the first four figures, and its duration."""
        faster = of.step_seconds / step_seconds
        return cls(*memory, step_seconds, of.tokens_per_second * faster, of.mfu * faster)

    def plain(self) -> dict[str, float]:
        """As JSON."""
        return {**self._asdict(), "memory": self.memory}


def error_percent(predicted: float, measured: float) -> float | None:
    """The error of a prediction in per cent of what was measured; None if nothing was."""
    return 100 * (predicted - measured) / measured if measured else None


def table(predicted: Figures, measured: Figures) -> str:
    """A line per figure."""
    size, share = readable_bytes, "{:.1%}".format
    rows = {
        "parameters": (predicted.parameters, measured.parameters, size),
        "optimizer": (predicted.optimizer, measured.optimizer, size),
        "gradients, activations, loss, communication": (predicted.transient, measured.transient, size),
        "allocator and context": (predicted.context, measured.context, size),
        "memory of the fullest process": (predicted.memory, measured.memory, size),
        "step": (1000 * predicted.step_seconds, 1000 * measured.step_seconds, "{:,.1f} ms".format),
        "tokens/s": (predicted.tokens_per_second, measured.tokens_per_second, "{:,.0f}".format),
        "MFU": (predicted.mfu, measured.mfu, share),
    }
    lines = [("", "predicted", "measured", "error")]
    for name, (ours, theirs, form) in rows.items():
        error = signed_percent(error_percent(ours, theirs))
        lines.append(
            (name, *(("not predicted", form(theirs), "-") if isnan(ours) else (form(ours), form(theirs), error)))
        )
    return text_table(lines, "lrrr")


def goals(predicted: Figures, measured: Figures, machine: Machine) -> list[str]:
    """Whether the goals are reached, a line each."""
    if machine.device != "cuda":
        return [
            f"no GPU: the goals (memory within {MEMORY_GOAL:g} %, time within {TIME_GOAL:g} %) are judged on GPUs only"
        ]
    judged = {"memory": (predicted.memory, measured.memory, MEMORY_GOAL)}
    lines = []
    if machine.name == UNKNOWN:
        lines.append("GPU of no known kind: time and MFU are for the most similar one; describe it under cluster.gpus")
    else:
        judged["time"] = (predicted.step_seconds, measured.step_seconds, TIME_GOAL)
    for name, (ours, theirs, goal) in judged.items():
        error = error_percent(ours, theirs)
        reached = error is not None and abs(error) <= goal
        lines.append(f"goal: {name} within {goal:g} %: {signed_percent(error)}, {'' if reached else 'NOT '}reached")
    return lines


def signed_percent(percent: float | None) -> str:
    """`+4.2 %`."""
    return "-" if percent is None else f"{percent:+.1f} %"
