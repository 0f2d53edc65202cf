"""Check that a checkpoint's files belong together: one per rank, all of one save, no copies.

Optimizer files do not record the iteration, so one row of each tensor tells whether the float32
weights were rounded to the 16-bit weights of the model files. Copies of a tensor on several ranks
should be equal bit for bit; a difference is the first sign of ranks that lost synchronisation.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.sources.source import Sharded, Source, row_bands, same_values
from training.checkpoint.files import StoredTensor

CURE = "copy every file of the save"
_ROUNDING = 2.0**-6  # bfloat16 has 8 significant bits; a bit for stochastic rounding, and a bit of margin
_SMALLEST = 1e-6  # float16 has few bits, or none, for weights below 6e-5

Grid = list[list[Path]]
"""The files of one kind by row and column, such as pipeline stage and tensor rank."""


def grid(paths: Iterable[Path], pattern: re.Pattern[str], *, sparse: bool = False) -> Grid:
    """The paths whose names match, by the numbers of the groups `row` and `column` (0 if absent).

    Raises CheckpointError naming a missing or a second file; `sparse`: rows may be missing.
    """
    by_rank: dict[tuple[int, int], Path] = {}
    for path in sorted(paths):
        if match := pattern.fullmatch(path.name):
            rank = int(match["row"] or 0), int(match["column"] or 0)
            if (other := by_rank.setdefault(rank, path)) != path:
                raise CheckpointError(f"{path}: is of the same rank as {other.name}; remove that of the other save")
    if not by_rank:
        return []
    example = next(iter(by_rank.values()))
    rows, columns = sorted({row for row, _ in by_rank}), range(1 + max(column for _, column in by_rank))
    rows = rows if sparse else list(range(rows[-1] + 1))
    for row in rows:
        for column in columns:
            if (row, column) not in by_rank:
                raise CheckpointError(f"{_sibling(example, pattern, row, column)}: missing; {CURE}")
    return [[by_rank[row, column] for column in columns] for row in rows]


def check_count(
    files: Grid, pattern: re.Pattern[str], axis: Literal["row", "column"], expected: int | None, what: str
) -> None:
    """Raises CheckpointError naming a file unless there are `expected` rows or columns."""
    count = len(files) if axis == "row" else len(files[0])
    if expected in (None, count):
        return
    first = min(count, expected or 0)  # the first file that is missing, or too many
    row, column = (first, 0) if axis == "row" else (0, first)
    if first == count:
        raise CheckpointError(f"{_sibling(files[0][0], pattern, row, column)}: missing of {expected} {what}; {CURE}")
    raise CheckpointError(f"{files[row][column]}: the save has {expected} {what}; remove this file of another save")


def check_alike(files: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
    """Raises CheckpointError naming a file that differs in values that a save's files share."""
    first: tuple[Path, Mapping[str, Any]] | None = None
    for path, values in files:
        first = first or (path, values)
        for what, expected in first[1].items():
            if values[what] != expected:
                raise CheckpointError(
                    f"{path}: {what} is {values[what]}, but {expected} in {first[0]}; the files do not belong "
                    f"together: {CURE}, and of no other"
                )


def iteration_of(folder: Path, recorded: int | None) -> int | None:
    """The iteration by the folder's name. Raises CheckpointError if its files say another one."""
    named = re.fullmatch(r"(iter_|global_step)(\d+)", folder.name)
    if named and recorded not in (None, int(named[2])):
        name = f"{named[1]}{recorded:0{7 if named[1] == 'iter_' else 0}d}"
        raise CheckpointError(
            f"{folder}: its files are of iteration {recorded}; rename it to {name} if nothing is missing"
        )
    return int(named[2]) if named else recorded


def check_agreement(rounded: Mapping[str, Sharded], masters: Mapping[str, Sharded]) -> None:
    """Raises CheckpointError if the middle row of a tensor differs by more than rounding."""
    cure = f"{CURE}; without *_optim_states.pt the latter are taken"
    for name in rounded.keys() & masters.keys():
        if rounded[name].shape != masters[name].shape:
            raise CheckpointError(f"tensor {name!r} has another shape in the model files; {cure}")
        row = rounded[name].shape[0] // 2
        low, high = (tensors[name].rows(row, row + 1).read().flatten().float() for tensors in (rounded, masters))
        if not low.any():
            continue  # a placeholder
        if not torch.allclose(low, high, rtol=_ROUNDING, atol=_SMALLEST, equal_nan=True):
            difference = float((low - high).abs().max())
            raise CheckpointError(
                f"row {row} of tensor {name!r} differs by {difference:.1e} from the 16-bit weights of the model "
                f"files, more than rounding explains; {cure}"
            )


def check_distinct(parts: Iterable[StoredTensor]) -> None:
    """Raises CheckpointError if two parts are equal and not constant: a rank's file was copied."""
    seen: dict[tuple[float, ...], StoredTensor] = {}
    for part in parts:
        start = part.rows(0, 1 if len(part.shape) > 1 else min(part.shape[0], 4096)).read()
        other = seen.setdefault(tuple(start.flatten().tolist()), part)
        if other is not part and same_values(other, part) and any(band.min() != band.max() for band in row_bands(part)):
            raise CheckpointError(
                f"the weights in {part.path} are those in {other.path}: one file was copied over another rank's; "
                "copy each from the run again"
            )


def _sibling(path: Path, pattern: re.Pattern[str], row: int, column: int) -> Path:
    """The file of another rank."""
    match, name = pattern.fullmatch(path.name), path.name
    assert match is not None
    for key, number in sorted({"row": row, "column": column}.items(), key=lambda item: -match.start(item[0])):
        start, end = match.span(key)
        name = name if start < 0 else f"{name[:start]}{number:0{end - start}d}{name[end:]}"
    return path.with_name(name)


@dataclass(frozen=True)
class ReplicaComparison:
    """The result of comparing all copies."""

    compared: int = 0
    """Copies."""
    drifted: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """By tensor and holder ("tensor rank 1"): the number of elements that differ from the tensor
    that is used, and the largest difference, infinite or NaN if a value is."""

    def __str__(self) -> str:
        if not self.compared:
            return "no replicas in the files"
        if not self.drifted:
            return f"{self.compared} replicated tensors are equal bit for bit"
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


def compare_replicas(source: Source) -> ReplicaComparison:
    """Compare every copy with its tensor; CheckpointError for a copy of another shape."""
    compared, drifted = 0, {}
    for name, tensor in source.tensors.items():
        for holder, copy in tensor.copies.items():
            if copy.shape != tensor.shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(copy.shape)} on {holder} and {list(tensor.shape)} elsewhere; the "
                    "files do not belong together"
                )
            compared += 1
            elements, largest = _difference(tensor, copy)
            if elements:
                drifted[name, holder] = elements, largest
    return ReplicaComparison(compared, drifted)


def _difference(tensor: Sharded, copy: Sharded) -> tuple[int, float]:
    """The number of elements that differ in a bit, and the largest absolute difference."""
    count, largest = 0, 0.0
    for ours, theirs in zip(row_bands(tensor), row_bands(copy), strict=True):
        same_type = ours.dtype == theirs.dtype
        differs = _bits(ours) != _bits(theirs) if same_type else ours.double() != theirs.double()
        if bool(differs.any()):
            count += int(differs.sum())
            band = (ours[differs].double() - theirs[differs].double()).abs().max()
            largest = float(torch.maximum(band, torch.tensor(largest, dtype=band.dtype)))  # NaN if one of them is
    return count, largest


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])
