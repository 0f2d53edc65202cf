"""A rectangle of a tensor: a rank's shard, a part in a file, a block of another layout."""

import math
from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple


class Region(NamedTuple):
    """A rectangle of a tensor; it may be empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The index after the last one, along each dimension."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index the region in its tensor."""
        return tuple(map(slice, self.offset, self.end))

    def intersection(self, other: "Region") -> "Region":
        """The elements that are in both regions of a tensor."""
        start = tuple(map(max, self.offset, other.offset))
        end = map(min, self.end, other.end)
        return Region(start, tuple(max(0, last - first) for first, last in zip(start, end, strict=True)))

    def within(self, outer: "Region") -> "Region":
        """The same elements, with an offset that counts from the first element of `outer`."""
        return Region(tuple(map(sub, self.offset, outer.offset)), self.shape)
