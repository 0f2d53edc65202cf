"""Compare the tensors that several holders have as copies: ranks of tensor parallelism, the last pipeline stage.

They should be equal bit for bit. A run that has lost its synchronisation shows here first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.sources.source import Sharded, Source
from convert.stored import row_bands


@dataclass(frozen=True)
class Replicas:
    """What the comparison of all copies found."""

    compared: int = 0
    """Copies."""
    drifted: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """By tensor and holder ("tensor rank 1"): the elements that differ from those that were used, in a bit at least,
    and the largest difference; infinite or NaN if one of two values is."""

    def __str__(self) -> str:
        if not self.drifted:
            return f"{self.compared} replicated tensors are equal bit for bit" if self.compared else "no replicas"
        (tensor, holder), (_, largest) = max(
            self.drifted.items(), key=lambda item: (math.isnan(item[1][1]), item[1][1])
        )
        return (
            f"{len(self.drifted)} of {self.compared} replicated tensors have drifted, at most by {largest:.3g}: "
            f"{tensor} of {holder}"
        )

    def report(self) -> dict[str, Any]:
        """For merge_report.json."""
        drifted: dict[str, dict[str, Any]] = {}
        for (tensor, holder), (elements, largest) in self.drifted.items():
            shown = largest if math.isfinite(largest) else str(largest)
            drifted.setdefault(tensor, {})[holder] = {"elements": elements, "largest_difference": shown}
        return {"compared": self.compared, "equal": self.compared - len(self.drifted), "drifted": drifted}


def compare_replicas(source: Source) -> Replicas:
    """Compare every copy of a tensor with the one that is used, a few rows at a time.

    Raises CheckpointError for a copy of another shape.
    """
    compared, drifted = 0, {}
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
                drifted[name, holder] = elements, largest
    return Replicas(compared, drifted)


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
