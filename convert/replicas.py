"""Compare the tensors that several holders have as copies: ranks of tensor parallelism, the last pipeline stage.

They should be equal bit for bit. A run that has lost its synchronisation shows here first.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.sources.source import Sharded, Source
from convert.stored import row_bands


@dataclass(frozen=True)
class Drift:
    """A copy of a tensor that is not bit for bit the one that was used."""

    tensor: str
    holder: str
    """The one that has the copy: "tensor rank 1"."""
    elements: int
    """That differ, in a bit at least."""
    largest_difference: float
    """Infinite or NaN if one of two values is."""


@dataclass(frozen=True)
class Replicas:
    """What the comparison of all copies found."""

    compared: int = 0
    """Copies."""
    drifted: tuple[Drift, ...] = ()

    def __str__(self) -> str:
        if not self.drifted:
            return f"{self.compared} replicated tensors are equal bit for bit" if self.compared else "no replicas"
        worst = max(self.drifted, key=lambda drift: (math.isnan(drift.largest_difference), drift.largest_difference))
        return (
            f"{len(self.drifted)} of {self.compared} replicated tensors have drifted, at most by "
            f"{worst.largest_difference:.3g}: {worst.tensor} of {worst.holder}"
        )


def compare_replicas(source: Source) -> Replicas:
    """Compare every copy of a tensor with the one that is used, a few rows at a time.

    Raises CheckpointError for a copy of another shape.
    """
    compared, drifted = 0, []
    for name, tensor in source.tensors.items():
        for holder, copy in tensor.copies.items():
            if _places(copy) != _places(tensor):
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(copy.shape)} on {holder} and {list(tensor.shape)} elsewhere, or "
                    "is cut in another way; the files do not belong together"
                )
            compared += 1
            elements, largest = _difference(tensor, copy)
            if elements:
                drifted.append(Drift(name, holder, elements, largest))
    return Replicas(compared, tuple(drifted))


def _difference(tensor: Sharded, copy: Sharded) -> tuple[int, float]:
    """(number of elements that differ, largest absolute difference; NaN if that is not a number)."""
    count, largest = 0, 0.0
    for mine, other in zip(tensor.blocks, copy.blocks, strict=True):
        for ours, theirs in zip(row_bands(mine.tensor), row_bands(other.tensor), strict=True):
            same_type = ours.dtype == theirs.dtype
            differs = _bits(ours) != _bits(theirs) if same_type else ours.double() != theirs.double()
            if bool(differs.any()):
                count += int(differs.sum())
                found = float((ours[differs].double() - theirs[differs].double()).abs().max())
                largest = found if math.isnan(found) or math.isnan(largest) else max(largest, found)
    return count, largest


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _places(tensor: Sharded) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(block.offset, tuple(block.tensor.shape)) for block in tensor.blocks]
