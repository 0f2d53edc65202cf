"""Tensors in files, read on demand: every format becomes byte ranges of plain data.

Both kinds of `Stored` are `Readable`; by index they give one row with a dimension less.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.checkpoint.files import StoredTensor as StoredTensor

_ELEMENTS = 4 << 20  # per band of rows


class Readable(Protocol):
    """A tensor in one file, or in several."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type in the files."""

    def read(self) -> Tensor:
        """A new contiguous tensor. Raises OSError naming the file if that ends early."""

    def rows(self, first: int, last: int) -> "Readable":
        """The rows from `first` to before `last` (of dimension 0)."""


@dataclass(frozen=True)
class StoredPieces:
    """A tensor made of several one-dimensional ranges, in order: ZeRO's partitions.

    Without pieces it is float32 zeros: a bias that a model lacks.
    """

    shape: tuple[int, ...]
    pieces: tuple["Stored", ...]

    @property
    def dtype(self) -> torch.dtype:
        """Its type in the files."""
        return self.pieces[0].dtype if self.pieces else torch.float32

    def read(self) -> Tensor:
        """The elements of all pieces."""
        whole = (torch.empty if self.pieces else torch.zeros)(math.prod(self.shape), dtype=self.dtype)
        start = 0
        for piece in self.pieces:
            whole[start : start + piece.shape[0]] = piece.read()
            start += piece.shape[0]
        return whole.view(self.shape)

    def rows(self, first: int, last: int) -> "StoredPieces":
        """The rows from `first` to before `last` (of dimension 0)."""
        width = math.prod(self.shape[1:])
        begin, end, position = first * width, last * width, 0
        kept: list[Stored] = []
        for piece in self.pieces:
            low, high = max(begin - position, 0), min(end - position, piece.shape[0])
            if low < high:
                kept.append(piece.rows(low, high))
            position += piece.shape[0]
        return StoredPieces((last - first, *self.shape[1:]), tuple(kept))

    def __getitem__(self, row: int) -> "StoredPieces":
        """One row, with a dimension less."""
        return StoredPieces(self.shape[1:], self.rows(row, row + 1).pieces)


Stored = StoredTensor | StoredPieces


def joined(parts: Sequence[Stored]) -> StoredPieces:
    """One-dimensional tensors as one."""
    return StoredPieces((sum(part.shape[0] for part in parts),), tuple(parts))


def row_bands(stored: Readable, elements: int = _ELEMENTS) -> Iterator[Tensor]:
    """A tensor's rows, about `elements` elements at a time."""
    rows = max(1, elements // max(1, math.prod(stored.shape[1:])))
    for start in range(0, stored.shape[0], rows):
        yield stored.rows(start, min(start + rows, stored.shape[0])).read()


def same_values(one: Readable, other: Readable) -> bool:
    """Whether two tensors are equal; they are read only if they are not the same bytes of a file."""
    if one == other:
        return True
    return tuple(one.shape) == tuple(other.shape) and all(map(torch.equal, row_bands(one), row_bands(other)))


def prefetch(calls: Iterable[Callable[[], Tensor]], count: int) -> Iterator[Tensor]:
    """The results of `calls`, in order, prefetched by a thread that computes up to `count` in advance."""
    started: deque[Future[Tensor]] = deque()
    # one thread for its operations, too: more would compete with the caller
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for call in calls:
                started.append(pool.submit(call))
                if len(started) > count:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:  # after an error of the caller, too
            pool.shutdown(cancel_futures=True)
