"""Which steps are taken: overflows, numbers that are not finite, and losses that leap.

    step = train_step(session, iteration, batches, rate, guard.scale, guard.accepts)
    guard.check(iteration, first_non_finite)        # TrainingError where the run must not go on

All processes see the same loss and gradient norm, so that all decide alike.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from common.errors import TrainingError
from common.settings import Experiment
from training.precision import LossScale

_WINDOW = 100  # losses whose mean a spike is measured against
_LIMIT = 10  # steps in a row, none of which could be taken


class Guard:
    """Judges each step by its loss and gradient norm, between the backward pass and the optimiser."""

    def __init__(self, experiment: Experiment, state: Mapping[str, Any] | None = None) -> None:
        self.train, self.watch = experiment.train, experiment.watch
        self.half = experiment.train.precision == "float16"
        state = state or {}
        self.loss_scale = (
            LossScale(**{key: value for key, value in state["loss_scale"].items() if key in LossScale.__annotations__})
            if self.half and "loss_scale" in state
            else LossScale.of(experiment.train)
        )
        self.losses: deque[float] = deque(state.get("losses", ()), _WINDOW)
        self.in_a_row: int = state.get("in_a_row", 0)
        self.spike = ""
        """What there is to say of a spike in this step."""
        self._stop = ""

    @property
    def scale(self) -> float:
        """What the loss of the next step is multiplied by."""
        return self.loss_scale.scale

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to decide as this one would: JSON."""
        scale = {"loss_scale": asdict(self.loss_scale)} if self.half else {}
        return {
            "losses": list(self.losses),
            "in_a_row": self.in_a_row,
            **scale,
        }

    def accepts(self, loss: float, grad_norm: float) -> bool:
        """Whether the optimiser takes this step."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        problem, harmless = self._problem(loss, grad_norm, finite)
        self.spike = problem if finite else ""
        taken = not problem or harmless
        self.in_a_row = 0 if taken else self.in_a_row + 1
        reaction = self.watch.spike_reaction if finite else self.watch.non_finite
        if self.half:
            self.loss_scale = self.loss_scale.after(not finite, self.train)
        if self.half and not finite:
            if self.loss_scale.at_floor >= _LIMIT:
                self._stop = f"{_LIMIT} overflows in a row with the loss scale at {self.scale:g}"
        elif not taken and (reaction == "stop" or self.in_a_row >= _LIMIT):
            self._stop = problem + (f", the {self.in_a_row}th step in a row" if self.in_a_row > 1 else "")
        if taken:
            self.losses.append(loss)
        return taken

    def _problem(self, loss: float, grad_norm: float, finite: bool) -> tuple[str, bool]:
        """What is wrong with a step, and whether it is taken all the same."""
        if not finite:
            return f"loss {loss:g}, gradient norm {grad_norm:g}", False
        if self.watch.spike and len(self.losses) == _WINDOW:
            above = loss - fmean(self.losses)
            if above > self.watch.spike:
                leap = f"loss {loss:.4f} is {above:.4f} nats above the mean of the {_WINDOW} before it"
                return leap, self.watch.spike_reaction == "warn"
        return "", True

    def check(self, iteration: int, first_non_finite: Callable[[], str]) -> None:
        """TrainingError when the run must not go on; the weights are still those of the step before.

        `first_non_finite` (a collective call) says where the numbers stop being finite.
        """
        if not self._stop:
            return
        where = f", first in {first_non_finite()}" if not self.spike else ""
        cure = "lower train.lr" if self.spike else "lower train.lr, or train in bfloat16 or float32"
        raise TrainingError(
            f"iteration {iteration}: {self._stop}{where}; nothing was saved after the last checkpoint: "
            f"start again from it with another setting ({cure}; models.NAME.watch says what the trainer reacts to)"
        )
