"""The precision of a run, and float16's loss scale.

Parameters and moments are float32 everywhere. Activations and matrix products have `precision_type`. Matrices are
rounded to it once per step: into copies, or where they are gathered from data-parallel ranks.

float16 has no values below 6e-8: the loss is multiplied by a scale that keeps the gradients above that. The scale is
found by trial (Micikevicius et al. 2018), with Megatron-LM's rules.
"""

import math
from dataclasses import dataclass, replace

import torch

from common.settings import TrainSettings

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOOR = 1.0  # the smallest loss scale


def precision_type(precision: str, device: torch.device) -> torch.dtype:
    """The type of activations and matrix products for `train.precision` on a device."""
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if fast else "float32"
    return _TYPES[precision]


@dataclass(frozen=True)
class LossScale:
    """The state of the search for the largest scale without overflows; immutable, replaced after every step."""

    scale: float
    clean: int = 0
    """Steps without an overflow since the scale changed, or since the last overflow."""
    hysteresis: int = 0
    """Overflows since the scale was last doubled."""
    at_floor: int = 0
    """Overflows in a row with the scale at FLOOR."""

    @classmethod
    def initial(cls, train: TrainSettings) -> "LossScale":
        """The scale at the start of a run: `initial_loss_scale` in float16, otherwise 1."""
        return cls(train.initial_loss_scale if train.precision == "float16" else FLOOR)

    def after(self, overflow: bool, train: TrainSettings) -> "LossScale":
        """The scale after one more step: halved from the `hysteresis`-th overflow on, doubled after a clean window."""
        if overflow:
            used = self.hysteresis + 1
            floor = self.scale <= FLOOR
            scale = self.scale if used < train.hysteresis else max(FLOOR, self.scale / 2)
            return LossScale(scale, 0, used, self.at_floor + 1 if floor else 0)
        if self.clean + 1 >= train.loss_scale_window:
            largest = math.ldexp(1.0, 126)  # above it, a float32 loss would overflow itself
            return LossScale(min(largest, self.scale * 2))
        return replace(self, clean=self.clean + 1, at_floor=0)
