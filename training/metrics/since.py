"""The steps since the last row of the training curve: what the next row says of them.

It travels with a checkpoint, so that a row after a resume is about the same steps as that of a run never stopped.
"""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from training.step import Step


class Since:
    """Losses and counts of some steps. Every loss is kept: a mean of sums would round in another way.

    grad_norm       of the last step that was taken, else of the last one
    skipped         steps that were not taken
    non_finite      steps whose loss or gradient was NaN or infinite
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norm = math.nan
        self.skipped = self.non_finite = 0

    @property
    def loss(self) -> float:
        """Mean over the steps that were taken; NaN where none was."""
        return fmean(self.losses) if self.losses else math.nan

    def add(self, step: Step) -> None:
        """One step more."""
        taken = step.taken and math.isfinite(step.loss)
        if taken or not self.losses:
            self.grad_norm = step.grad_norm
        if taken:
            self.losses.append(step.loss)
        self.skipped += not step.taken
        self.non_finite += not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))

    def state(self) -> dict[str, Any]:
        """For `restore`: JSON, which has no NaN; empty where there was no step."""
        if not self.losses and not self.skipped and not self.non_finite:
            return {}
        norm = self.grad_norm if math.isfinite(self.grad_norm) else str(self.grad_norm)
        return {
            "losses": self.losses,
            "grad_norm": norm,
            "skipped": self.skipped,
            "non_finite": self.non_finite,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; nothing in a checkpoint of an older version."""
        self.losses = [float(loss) for loss in state.get("losses", ())]
        self.grad_norm = float(state.get("grad_norm", math.nan))
        self.skipped, self.non_finite = int(state.get("skipped", 0)), int(state.get("non_finite", 0))
