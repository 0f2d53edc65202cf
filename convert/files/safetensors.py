"""safetensors files: written tensor by tensor, and read as the byte ranges in which the tensors lie.

    bytes  content
    8      N, little-endian
    N      JSON, padded with spaces so that the tensors begin at a multiple of 8:
           {"__metadata__": {"format": "pt"}, "wpe": {"dtype": "F16", "shape": [8, 3], "data_offsets": [0, 48]}, …}
    rest   the tensors, contiguous, little-endian, one after the other; offsets count from the first of them

The library's own `save_file` needs all tensors in memory; here only their shapes are needed to begin.
Source: https://huggingface.co/docs/safetensors
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.files.checksums import once
from convert.files.stored import StoredTensor
from training.checkpoint.storage import HashedFile
from training.huggingface.origin import check_hash

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
"""Names in the header; others are refused."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the library's own limit


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[Tensor],
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write `tensors`, which come in the order of `shapes`, as they are needed; returns `{"size": …, "xxh3": …}`.

    `progress` is called with the number of bytes after each tensor. Raises OSError naming the file if it cannot be
    written.
    """
    with HashedFile(path) as file:
        file.write(_header(shapes, dtype))
        written = 0
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tuple(tensor.shape) == shape and tensor.dtype == dtype
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            written = tensor.nbytes
            del tensor  # before the next one is made
            progress(written)
    return file.entry()


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a file; reads the header only. Of a folder of ours, the hash is compared before the first read.

    Raises CheckpointError if the file is no safetensors file, is cut off, or has an unknown type.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(_MAX_HEADER, total - 8):
                raise CheckpointError(f"{path}: damaged or cut off (no safetensors header)")
            header = orjson.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError:
        raise CheckpointError(f"{path}: damaged (its safetensors header is no JSON)") from None
    start, check = 8 + length, once(check_hash, path)
    try:
        found = {
            name: replace(_locate(path, name, entry, start), check=check)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: damaged (its safetensors header is not understood)") from None
    _check_complete(path, found, start, total)
    return found


def _locate(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has type {entry['dtype']}, which is not read")
    dtype, shape, (begin, end) = (
        DTYPES[entry["dtype"]],
        tuple(map(int, entry["shape"])),
        map(int, entry["data_offsets"]),
    )
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize or any(size < 0 for size in shape):
        raise CheckpointError(f"{path}: damaged (tensor {name!r} of shape {list(shape)} has {end - begin} bytes)")
    return StoredTensor(path, start + begin, dtype, shape)


def _check_complete(path: Path, tensors: Mapping[str, StoredTensor], position: int, total: int) -> None:
    """CheckpointError unless the tensors fill the file from `position` on without gaps and overlaps."""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, math.prod(item[1].shape))):
        if tensor.offset != position:
            raise CheckpointError(f"{path}: damaged (a gap or an overlap before tensor {name!r})")
        position += math.prod(tensor.shape) * tensor.dtype.itemsize
    if position > total:
        raise CheckpointError(f"{path}: cut off ({total:,} bytes, {position:,} are expected)")
    if position < total:
        raise CheckpointError(f"{path}: damaged ({total - position:,} bytes after the last tensor)")
