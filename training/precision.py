"""The precision of the matrix products, and float16's loss scale.

Parameters, gradients and moments are float32 everywhere; autocast gives the products bfloat16 or float16 operands.
float16 has no room below 6e-8: the loss is multiplied by a scale that keeps its gradients above that, and is found by
trying (Micikevicius et al. 2018), with the rules of Megatron-LM.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from common.settings import TrainSettings

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOOR = 1.0  # the least loss scale


def precision_type(precision: str, device: torch.device) -> torch.dtype:
    """The type that `train.precision` means on a device."""
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if fast else "float32"
    return _TYPES[precision]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The precision of the matrix products; parameters stay float32."""
    wanted = precision_type(precision, device)
    half = torch.bfloat16 if wanted == torch.float32 else wanted  # a type is checked even where autocast is off
    return torch.autocast(device.type, half, enabled=wanted != torch.float32)


@dataclass(frozen=True)
class LossScale:
    """Where the search for the largest scale without overflows stands: a value, replaced after every step."""

    scale: float
    clean: int = 0
    """Steps without an overflow since the scale changed, or since the last overflow."""
    hysteresis: int = 0
    """Overflows since the scale last grew."""
    at_floor: int = 0
    """Overflows in a row with the scale at FLOOR."""

    @classmethod
    def of(cls, train: TrainSettings) -> "LossScale":
        """The one that a run starts with: 1 for ever, unless its precision is float16."""
        return cls(train.initial_loss_scale if train.precision == "float16" else FLOOR)

    def after(self, overflow: bool, train: TrainSettings) -> "LossScale":
        """The scale after one more step: half from the `hysteresis`-th overflow on, double after a clean window."""
        if overflow:
            used = self.hysteresis + 1
            floor = self.scale <= FLOOR
            scale = self.scale if used < train.hysteresis else max(FLOOR, self.scale / 2)
            return LossScale(scale, 0, used, self.at_floor + 1 if floor else 0)
        if self.clean + 1 >= train.loss_scale_window:
            largest = math.ldexp(1.0, 126)  # beyond which a float32 loss itself overflows
            return LossScale(min(largest, self.scale * 2))
        return replace(self, clean=self.clean + 1, at_floor=0)
