"""Decides which steps the optimiser takes: overflows, numbers that are not finite, and loss spikes.

    step = compute_gradients(session, iteration, batches, guard.scale)
    taken = guard.judge(step.loss, step.grad_norm)
    guard.check(iteration, find_non_finite)        # raises TrainingError if the run must stop

All processes see the same loss and gradient norm, so they all decide alike.

float16 has no values below 6e-8: the loss is multiplied by a scale that keeps the gradients above
that. The scale is found by trial (Micikevicius et al. 2018), with Megatron-LM's rules.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from common.errors import TrainingError
from common.settings import TrainSettings, WatchSettings

_WINDOW = 100  # losses whose mean a spike is measured against
_LIMIT = 10  # steps in a row that may be left out
_FLOOR = 1.0  # the smallest loss scale


@dataclass(frozen=True)
class LossScale:
    """The search for the largest scale without overflows: immutable, replaced after every step."""

    scale: float
    clean: int = 0  # steps without an overflow since the scale changed, or since the last overflow
    hysteresis: int = 0  # overflows since the scale was last doubled
    at_floor: int = 0  # overflows in a row with the smallest scale

    def after(self, overflow: bool, train: TrainSettings) -> "LossScale":
        """The next scale: halved from overflow `hysteresis` on, doubled after a clean window."""
        if overflow:
            used = self.hysteresis + 1
            floor = self.scale <= _FLOOR
            scale = self.scale if used < train.hysteresis else max(_FLOOR, self.scale / 2)
            return LossScale(scale, 0, used, self.at_floor + 1 if floor else 0)
        if self.clean + 1 >= train.loss_scale_window:
            largest = math.ldexp(1.0, 126)  # above it, a float32 loss would overflow itself
            return LossScale(min(largest, self.scale * 2))
        return replace(self, clean=self.clean + 1, at_floor=0)


class Guard:
    """The recent losses and the loss scale, which decide whether a step is taken."""

    def __init__(self, train: TrainSettings, watch: WatchSettings, state: Mapping[str, Any] | None = None) -> None:
        self._train, self._watch = train, watch
        self._float16 = train.precision == "float16"
        state = state or {}
        self._loss_scale = LossScale(train.initial_loss_scale if self._float16 else _FLOOR)
        if self._float16 and "loss_scale" in state:
            self._loss_scale = LossScale(**state["loss_scale"])
        self._losses: deque[float] = deque(state.get("losses", ()), _WINDOW)
        self._in_a_row: int = state.get("in_a_row", 0)  # steps left out since the last one taken
        self._stop = ""
        self.spike = ""  # describes the last step's loss if it is a spike; the step may still be taken
        self.problem = ""  # what is wrong with the last step; "" if it only lowers float16's loss scale

    @property
    def scale(self) -> float:
        """The factor for the loss of the next step."""
        return self._loss_scale.scale

    def state(self) -> dict[str, Any]:
        """The state as JSON: a resumed run decides in the same way."""
        scale = {"loss_scale": asdict(self._loss_scale)} if self._float16 else {}
        return {"losses": list(self._losses), "in_a_row": self._in_a_row, **scale}

    def judge(self, loss: float, grad_norm: float) -> bool:
        """Judge a step, once, by its loss and gradient norm; returns whether it is taken."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.spike = self._spike(loss) if finite else ""
        self.problem = self.spike if finite else f"loss {loss:g}, gradient norm {grad_norm:g}"
        taken = finite and not (self.spike and self._watch.spike_reaction != "warn")
        self._in_a_row = 0 if taken else self._in_a_row + 1
        if self._float16:
            self._loss_scale = self._loss_scale.after(not finite, self._train)
        if taken:
            self._losses.append(loss)
        elif self._float16 and not finite:
            if self._loss_scale.at_floor < _LIMIT:
                self.problem = ""
            else:
                self._stop = f"{_LIMIT} overflows in a row with the loss scale at {self.scale:g}"
        else:
            reaction = self._watch.spike_reaction if finite else self._watch.non_finite
            if reaction == "stop" or self._in_a_row >= _LIMIT:
                in_a_row = f", the {self._in_a_row}th step in a row" if self._in_a_row > 1 else ""
                self._stop = self.problem + in_a_row
        return taken

    def _spike(self, loss: float) -> str:
        if not self._watch.spike or len(self._losses) < _WINDOW:
            return ""
        above = loss - fmean(self._losses)
        spike = f"loss {loss:.4f} is {above:.4f} nats above the mean of the {_WINDOW} before it"
        return spike if above > self._watch.spike else ""

    def check(self, iteration: int, find_non_finite: Callable[[], str]) -> None:
        """Raises TrainingError if the run must stop; the bad step has not changed the weights.

        `find_non_finite` (a collective call) names the first module whose numbers are not finite.
        """
        if not self._stop:
            return
        where = "" if self.spike else f", first in {find_non_finite()}"
        cure = "lower train.lr" if self.spike else "lower train.lr, or train in bfloat16 or float32"
        raise TrainingError(
            f"iteration {iteration}: {self._stop}{where}; nothing was saved after the last checkpoint: "
            f"start again from it with another setting ({cure}; models.NAME.watch sets how the trainer reacts)"
        )
