"""What the planner predicts of a layout, beside what a few steps of it took.

comparison = compare(Figures.predicted(prediction), measured)
"""

from typing import NamedTuple, Self

from common.tables import text_table
from training.planning.layout import Layout
from training.planning.search import Prediction
from training.planning.terms import by_part

MEMORY_GOAL, TIME_GOAL = 10.0, 15.0  # per cent, on GPUs


class Figures(NamedTuple):
    """Bytes of the fullest process at its peak; seconds of a step, and speeds of all processes together."""

    parameters: float
    optimizer: float
    """The optimiser's state."""
    step: float
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
        return self.parameters + self.optimizer + self.step + self.context

    @classmethod
    def predicted(cls, prediction: Prediction) -> Self:
        """The planner's."""
        parts = by_part(prediction.memory)
        alone = [parts.pop(part, 0.0) for part in ("parameters", "optimizer", "context")]
        parameters, optimizer, context = alone
        speed = (prediction.step_seconds, prediction.tokens_per_second, prediction.mfu)
        return cls(parameters, optimizer, sum(parts.values()), context, *speed)

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
        "gradients, activations, loss, communication": (predicted.step, measured.step, size),
        "allocator and context": (predicted.context, measured.context, size),
        "memory of the fullest process": (predicted.memory, measured.memory, size),
        "step": (1000 * predicted.step_seconds, 1000 * measured.step_seconds, "{:,.1f} ms".format),
        "tokens/s": (predicted.tokens_per_second, measured.tokens_per_second, "{:,.0f}".format),
        "MFU": (predicted.mfu, measured.mfu, share),
    }
    lines = [("", "predicted", "measured", "error")]
    for name, (ours, theirs, form) in rows.items():
        lines.append((name, form(ours), form(theirs), signed_percent(error_percent(ours, theirs))))
    return text_table(lines, "lrrr")


def goals(predicted: Figures, measured: Figures, device: str) -> list[str]:
    """Whether the goals are reached, a line each; `device` is cuda or cpu."""
    if device != "cuda":
        return [
            f"no GPU: the goals (memory within {MEMORY_GOAL:g} %, time within {TIME_GOAL:g} %) are judged on GPUs only"
        ]
    judged = {
        "memory": (predicted.memory, measured.memory, MEMORY_GOAL),
        "time": (predicted.step_seconds, measured.step_seconds, TIME_GOAL),
    }
    lines = []
    for name, (ours, theirs, goal) in judged.items():
        error = error_percent(ours, theirs)
        reached = error is not None and abs(error) <= goal
        lines.append(f"goal: {name} within {goal:g} %: {signed_percent(error)}, {'' if reached else 'NOT '}reached")
    return lines


def layout_text(layout: Layout) -> str:
    """`tp 2 sp, pp 4 x 2, dp 8 ZeRO 1, batch 4 x 16, selective recompute`; what is not used is left out."""
    tensor = f"tp {layout.tensor}{' sp' * layout.sequence_parallel}"
    pipeline = f"pp {layout.pipeline}{f' x {layout.virtual_stages}' * (layout.virtual_stages > 1)}"
    data = f"dp {layout.data} ZeRO {layout.zero_stage}{' offload' * layout.offload}"
    used = [(layout.tensor > 1, tensor), (layout.pipeline > 1, pipeline), (layout.data > 1, data)]
    batch = f"batch {layout.micro_batch_size} x {layout.accumulation}"
    recompute = [f"{layout.recompute} recompute"] * (layout.recompute != "none")
    return ", ".join([*(text for uses, text in used if uses), batch, *recompute])


def signed_percent(percent: float | None) -> str:
    """`+4.2 %`."""
    return "-" if percent is None else f"{percent:+.1f} %"


def readable_bytes(number: float) -> str:
    """`14.75 GiB`, `3.2 MiB`."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
