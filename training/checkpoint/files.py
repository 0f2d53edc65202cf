"""safetensors files: written tensor by tensor, hashed during the write, and read as byte ranges.

    bytes  content
    8      N, little-endian
    N      JSON, padded with spaces so that the tensors begin at a multiple of 8:
           {"__metadata__": {"format": "pt"},
            "wpe": {"dtype": "F16", "shape": [8, 3], "data_offsets": [0, 48]}, …}
    rest   the tensors, contiguous, little-endian; offsets count from the first one's start

The library checks a header. Its `save_file` needs all tensors in memory; this writer needs only
their shapes at the start. The library reads through a memory map, whose pages count as memory of
the process; this reader fills the target with `readinto`.
Source: https://huggingface.co/docs/safetensors
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import CheckpointError
from training.region import Region

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in a file's header; all others are refused."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
THREADS = 4
"""Files that a rank writes, reads or hashes at once: at most one GPU's share of a node's cores."""
_READ = 16 << 20  # bytes per read
_CHUNK = 1 << 20  # bytes per write: fits a core's cache; writes of 8 MB had half of the speed
_WRITE_BACK = 8 << 20  # bytes between requests to the kernel to write to disk: little is left for fsync

Described = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


class HashedFile:
    """A new file that is hashed during the write and fsynced when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._hash = xxhash.xxh3_128()
        self._file: IO[bytes] = path.open("xb")
        self._flushed = 0  # bytes that the kernel was asked to write to disk
        self._failure: OSError | None = None  # raised again at the end: torch.save turns it into a RuntimeError

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._failure = self._failure or error
        if self._failure is not None:
            raise OSError(self._failure.errno, self._failure.strerror, str(self.path)) from None

    def entry(self) -> dict[str, Any]:
        """`{"size": bytes, "xxh3": hex}`."""
        return {"size": self.size, "xxh3": self._hash.hexdigest()}

    def write(self, data: Any) -> int:
        """Append bytes; returns how many."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                self._file.write(chunk)
                self._hash.update(chunk)
                self.size += len(chunk)
                if self.size - self._flushed >= _WRITE_BACK:
                    if hasattr(os, "posix_fadvise"):  # pages that are not on the disk yet stay in memory
                        length = self.size - self._flushed
                        os.posix_fadvise(self._file.fileno(), self._flushed, length, os.POSIX_FADV_DONTNEED)
                    self._flushed = self.size
        except OSError as error:
            self._failure = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing; torch.save requires the method."""


def write_file(
    path: Path,
    described: Mapping[str, Described],
    tensors: Iterable[Tensor],
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write `tensors` in the order of `described`, one at a time; returns `{"size": …, "xxh3": …}`.

    `progress` is called with the number of bytes after each tensor. Raises OSError naming the file
    if it cannot be written.
    """
    with HashedFile(path) as file:
        file.write(_header(described))
        for (dtype, shape), tensor in zip(described.values(), tensors, strict=True):
            assert tuple(tensor.shape) == shape and tensor.dtype == dtype
            written = tensor.nbytes
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
            progress(written)
    return file.entry()


def _header(described: Mapping[str, Described]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's bytes in a file: a safetensors file, a zip-format .pt or a .distcp record."""

    path: Path
    offset: int
    """Of the first element, in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """In elements; None if contiguous."""
    check: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called before each read; raises CheckpointError if the file is damaged."""

    def __post_init__(self) -> None:
        contiguous = (math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        if self.stride is not None and all(
            size == 1 or step == wanted  # the step of a dimension of size 1 means nothing
            for size, step, wanted in zip(self.shape, self.stride, contiguous, strict=True)
        ):
            object.__setattr__(self, "stride", None)

    def read(self) -> Tensor:
        """A new contiguous tensor. Raises OSError naming a file that is unreadable or too short."""
        count = math.prod(self.shape)
        if self.stride is not None and count:
            count = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(count, dtype=self.dtype)
        self._read_bytes(flat)
        if self.stride is None or not count:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride).contiguous()

    def read_into(self, target: Tensor) -> None:
        """Fill a tensor of this shape; no copy if it is contiguous, on the CPU and of this type."""
        if self.stride is None and (target.dtype, target.device.type) == (self.dtype, "cpu") and target.is_contiguous():
            self._read_bytes(target)
        else:
            target.copy_(self.read())

    def rows(self, first: int, last: int) -> "StoredTensor":
        """The rows from `first` to before `last` (of dimension 0)."""
        step = self.stride[0] if self.stride is not None else math.prod(self.shape[1:])
        start = self.offset + first * step * self.dtype.itemsize
        return replace(self, offset=start, shape=(last - first, *self.shape[1:]))

    def __getitem__(self, row: int) -> "StoredTensor":
        """One row, without the first dimension: a layer of a stacked tensor."""
        one = self.rows(row, row + 1)
        return replace(one, shape=one.shape[1:], stride=one.stride and one.stride[1:])

    def _read_bytes(self, tensor: Tensor) -> None:
        if self.check is not None:
            self.check()
        view = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, len(view), _READ):
                chunk = view[start : start + _READ]
                if file.readinto(chunk) != len(chunk):
                    raise OSError(errno.EIO, "ends early", str(self.path))


class Block(NamedTuple):
    """A part of a tensor in a file."""

    offset: tuple[int, ...]
    """Of the part in the tensor."""
    tensor: StoredTensor

    @property
    def region(self) -> Region:
        """The part of the tensor."""
        return Region(self.offset, self.tensor.shape)

    def copy_to(self, target: Tensor, region: Region) -> None:
        """Read what the block has of a region of the tensor into `target`, which holds that region.

        Reads whole rows of the block and cuts columns in memory.
        """
        shared = self.region.intersection(region)
        inside, part = shared.within(self.region).slices, target[shared.within(region).slices]
        rows = self.tensor.rows(inside[0].start, inside[0].stop) if inside else self.tensor
        if rows.shape == part.shape:
            rows.read_into(part)
        else:
            part.copy_(rows.read()[(slice(None), *inside[1:])])


def read_file(path: Path, check: Callable[[], None] | None = None) -> dict[str, StoredTensor]:
    """The tensors in a file; reads only the header. `check` is called before each read of a tensor.

    Raises CheckpointError if it is not a safetensors file, is cut off, or has an unknown type.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # sizes, gaps and overlaps are checked
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = orjson.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: cut off or damaged ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: tensor {name!r} has type {entry['dtype']}, which is not read")
            start = 8 + length + entry["data_offsets"][0]
            tensors[name] = StoredTensor(path, start, DTYPES[entry["dtype"]], tuple(entry["shape"]), check=check)
    return tensors
