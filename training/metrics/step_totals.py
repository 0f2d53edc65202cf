"""Adds up the steps since the last row of the training curve.

The sums are saved with a checkpoint, so that the first row after a resume covers the same steps as in a run that was
never stopped.
"""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any


class StepTotals:
    """Losses and counts of some steps. Every loss is kept, because a mean of partial sums would round differently.

    grad_norm       of the last step that was taken, or of the last step if none was
    skipped         steps that were not taken
    non_finite      steps whose loss or gradient was NaN or infinite
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norm = math.nan
        self.skipped = self.non_finite = 0

    @property
    def loss(self) -> float:
        """Mean over the steps that were taken; NaN if none was."""
        return fmean(self.losses) if self.losses else math.nan

    def add(self, loss: float, grad_norm: float, taken: bool) -> None:
        """Add one step."""
        counts = taken and math.isfinite(loss)
        if counts or not self.losses:
            self.grad_norm = grad_norm
        if counts:
            self.losses.append(loss)
        self.skipped += not taken
        self.non_finite += not (math.isfinite(loss) and math.isfinite(grad_norm))

    def state(self) -> dict[str, Any]:
        """The sums for `restore` as JSON, which has no NaN; empty if there was no step."""
        if not self.losses and not self.skipped and not self.non_finite:
            return {}
        norm = self.grad_norm if math.isfinite(self.grad_norm) else str(self.grad_norm)
        return {"losses": list(self.losses), "grad_norm": norm, "skipped": self.skipped, "non_finite": self.non_finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; a checkpoint of an older version has an empty one."""
        self.losses = [float(loss) for loss in state.get("losses", ())]
        self.grad_norm = float(state.get("grad_norm", math.nan))
        self.skipped, self.non_finite = int(state.get("skipped", 0)), int(state.get("non_finite", 0))
