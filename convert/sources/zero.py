"""Where ZeRO's flat partitions hold each parameter. Source: DeepSpeed, deepspeed/utils/zero_to_fp32.py.

Stages 1 and 2, per group of parameters: [p0 p1 p2 … alignment], cut into one equal partition per data rank
Stage 3, per data rank: [its share of p0, of p1, …], a share is ceil(size / ranks) elements; groups follow each other
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from common.errors import CheckpointError
from convert.files.stored import Stored, StoredPieces

Shapes = Mapping[str, tuple[int, ...]]
"""Names and shapes in the order of the flat data."""


class _Flat:
    """One-dimensional tensors, one after the other."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(part.shape[0] for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def cut(self, start: int, count: int) -> Iterator[Stored]:
        """The ranges that hold the elements from `start` to before `start + count`."""
        number, end = bisect_right(self._starts, start) - 1, start + count
        while start < end:
            first, stop = self._starts[number], min(end, self._starts[number + 1])
            if start < stop:
                yield self._parts[number].rows(start - first, stop - first)
            start, number = max(start, stop), number + 1


def cut_group(shapes: Shapes, partitions: Sequence[Stored], paddings: Sequence[int] = ()) -> dict[str, StoredPieces]:
    """Stages 1 and 2: the parameters of one group, from its partitions in the order of the data ranks.

    `paddings` are the elements after each parameter, if the writer aligned them. Raises CheckpointError if the
    partitions do not hold exactly these parameters.
    """
    paddings = paddings or [0] * len(shapes)
    starts = [0, *accumulate(math.prod(shape) + more for shape, more in zip(shapes.values(), paddings, strict=True))]
    flat, alignment = _Flat(partitions), 2 * len(partitions)
    # the group is padded to a multiple of the alignment; a writer may cut the padding off again
    if not starts[-1] <= len(flat) <= -(-starts[-1] // alignment) * alignment:
        raise _wrong_size(len(flat), shapes, len(partitions))
    return {
        name: StoredPieces(shape, tuple(flat.cut(start, math.prod(shape))))
        for start, (name, shape) in zip(starts, shapes.items(), strict=False)
    }


def cut_stage3(shapes: Shapes, partitions: Sequence[Sequence[Stored]]) -> dict[str, StoredPieces]:
    """Stage 3: the parameters of all groups, from `partitions[data rank][group]`.

    Raises CheckpointError if the partitions do not hold exactly these parameters.
    """
    ranks, start, found = [_Flat(groups) for groups in partitions], 0, {}
    expected = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values())
    for rank in ranks:
        if len(rank) != expected:
            raise _wrong_size(len(rank) * len(ranks), shapes, len(ranks))
    for name, shape in shapes.items():
        size = math.prod(shape)
        share = -(-size // len(ranks))
        pieces: list[Stored] = []
        for number, rank in enumerate(ranks):
            pieces += rank.cut(start, max(0, min(share, size - number * share)))
        found[name] = StoredPieces(shape, tuple(pieces))
        start += share
    return found


def join_fragments(shape: tuple[int, ...], fragments: Sequence[Stored]) -> StoredPieces:
    """Stage 3: one parameter from its shares, one per data rank; the last ones are padded."""
    found = cut_stage3({"": shape}, [[fragment] for fragment in fragments])
    return found[""]


def _wrong_size(held: int, shapes: Shapes, ranks: int) -> CheckpointError:
    needed = sum(map(math.prod, shapes.values()))
    return CheckpointError(
        f"the partitions of {ranks} data ranks hold {held} elements, but the parameters have {needed}; "
        "the files are of different runs, or the optimizer state was not in memory when they were saved"
    )
