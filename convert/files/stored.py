"""Tensors that lie in files and are read when they are needed: every format becomes byte ranges of plain data.

Reading goes through `readinto` and not through a memory map: mapped pages would count as memory of this process.
"""

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_CHUNK = 16 << 20  # bytes per read
_ELEMENTS = 4 << 20  # per band of rows


class Stored(Protocol):
    """A tensor that can be read, in whole or by rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type in the file."""

    def read(self) -> Tensor:
        """A new contiguous tensor. Raises OSError naming the file if that ends early or cannot be read."""

    def rows(self, first: int, last: int) -> "Stored":
        """The rows from `first` to before `last` (of dimension 0)."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's bytes in a file: those of a safetensors file, of a zip-format .pt or of a .distcp record."""

    path: Path
    offset: int
    """Of the first element, in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """In elements; None if contiguous."""
    check: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Is called before each read; raises CheckpointError if the file is damaged."""

    def __post_init__(self) -> None:
        # the step of a dimension of size 1 means nothing
        if self.stride is not None and all(
            size == 1 or step == wanted
            for size, step, wanted in zip(self.shape, self.stride, _contiguous_stride(self.shape), strict=True)
        ):
            object.__setattr__(self, "stride", None)

    def read(self) -> Tensor:
        """A new contiguous tensor. Raises OSError naming the file if that ends early or cannot be read."""
        if self.stride is None or math.prod(self.shape) == 0:
            return self._read_span(math.prod(self.shape)).view(self.shape)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self._read_span(span).as_strided(self.shape, self.stride).contiguous()

    def read_into(self, target: Tensor) -> None:
        """Read into a contiguous tensor of the same shape and type."""
        if self.stride is None:
            self._read_bytes(target)
        else:
            target.copy_(self.read())

    def rows(self, first: int, last: int) -> "StoredTensor":
        """The rows from `first` to before `last` (of dimension 0)."""
        start = self.offset + first * self._row_stride() * self.dtype.itemsize
        return replace(self, offset=start, shape=(last - first, *self.shape[1:]))

    def __getitem__(self, row: int) -> "StoredTensor":
        """One row, with a dimension less: a layer of a stacked tensor."""
        start = self.offset + row * self._row_stride() * self.dtype.itemsize
        return replace(self, offset=start, shape=self.shape[1:], stride=self.stride and self.stride[1:])

    def _row_stride(self) -> int:
        return self.stride[0] if self.stride is not None else math.prod(self.shape[1:])

    def _read_span(self, count: int) -> Tensor:
        tensor = torch.empty(count, dtype=self.dtype)
        self._read_bytes(tensor)
        return tensor

    def _read_bytes(self, tensor: Tensor) -> None:
        if self.check is not None:
            self.check()
        view = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                if file.readinto(chunk) != len(chunk):
                    raise OSError(errno.EIO, "ends early", str(self.path))


@dataclass(frozen=True)
class StoredPieces:
    """A tensor whose elements lie, in order, in several one-dimensional ranges: ZeRO's partitions."""

    shape: tuple[int, ...]
    pieces: tuple[Stored, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Its type in the files."""
        return self.pieces[0].dtype

    def read(self) -> Tensor:
        """A new contiguous tensor."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
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


@dataclass(frozen=True, eq=False)
class LoadedTensor:
    """A tensor in memory: of a .pt file in the format before torch 1.6, which cannot be read in parts."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.tensor.dtype

    def read(self) -> Tensor:
        """A contiguous tensor; may share memory with `tensor`."""
        return self.tensor.contiguous()

    def rows(self, first: int, last: int) -> "LoadedTensor":
        """The rows from `first` to before `last` (of dimension 0)."""
        return LoadedTensor(self.tensor[first:last])


def row_bands(stored: Stored) -> Iterator[Tensor]:
    """A tensor's rows, a few million elements at a time."""
    rows = max(1, _ELEMENTS // max(1, math.prod(stored.shape[1:])))
    for start in range(0, stored.shape[0], rows):
        yield stored.rows(start, min(start + rows, stored.shape[0])).read()


def same_values(one: Stored, other: Stored) -> bool:
    """Whether two tensors are equal; they are read only if they are not the same bytes of a file."""
    if one == other:
        return True
    return tuple(one.shape) == tuple(other.shape) and all(map(torch.equal, row_bands(one), row_bands(other)))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
