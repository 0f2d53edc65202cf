"""Folders of torch.distributed.checkpoint (DCP): `.metadata`, and records of tensors in `.distcp` files.

A record is a zip archive by torch.save inside a file; where its data begins is found without reading the data.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _ReaderView

from common.errors import CheckpointError
from convert.files.checksums import MAX_PICKLE, check_archive, once
from convert.files.inert import load_inert
from convert.files.stored import Stored, StoredPieces, StoredTensor
from convert.sources.source import Block, Sharded
from training.checkpoint.metadata import RAW, read_metadata
from training.checkpoint.unpickling import Placeholder, load_plain

_REBUILD = "torch._utils._rebuild_tensor_v2"
_STORAGES = {
    f"torch.{name}": dtype
    for name, dtype in {
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "DoubleStorage": torch.float64,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
    }.items()
}

_Records = Mapping[tuple[str, tuple[int, ...]], _StorageInfo]


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the folder, as `.metadata` describes it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], _StorageInfo], ...]
    """Offset, shape and record of each part."""


class Dcp(Mapping[str, DcpTensor]):
    """The tensors of a folder by their keys; no file but `.metadata` has been read."""

    def __init__(self, folder: Path, tensors: Mapping[str, DcpTensor], objects: Mapping[str, _StorageInfo]) -> None:
        self.folder, self._tensors = folder, tensors
        self.objects = objects
        """Records of what is no tensor."""
        self._sizes: dict[str, int] = {}
        self._checks: dict[str, Callable[[], None]] = {}

    def __getitem__(self, key: str) -> DcpTensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def sharded(self, key: str, shape: tuple[int, ...] | None = None) -> Sharded:
        """A tensor as the blocks in the files; `shape` is its true one if its parts may be stored flat.

        Raises CheckpointError naming the tensor and the file if a part is missing, cut off, or overlaps another.
        """
        shape, blocks = self._shaped_blocks(key, shape)
        return self._join(key, shape, blocks)

    def layers(self, key: str, shape: tuple[int, ...] | None = None) -> list[Sharded]:
        """The same for each index of the leading dimension: the layers of a stacked tensor."""
        shape, blocks = self._shaped_blocks(key, shape)
        layers: list[list[Block]] = [[] for _ in range(shape[0])]
        for (first, *offset), stored in blocks:
            for row in range(stored.shape[0]):
                layers[first + row].append(Block(tuple(offset), _row(stored, row)))
        return [self._join(key, shape[1:], blocks) for blocks in layers]

    def load_object(self, key: str) -> Any:
        """What is no tensor, read by `load_inert`."""
        path, start, length = self._locate(key, self.objects[key])
        with path.open("rb") as file:
            file.seek(start)
            return load_inert(path, file.read(length))

    def files(self) -> set[Path]:
        """Every file that has been looked into."""
        return {self.folder / ".metadata", *(self.folder / name for name in self._sizes)}

    def _join(self, key: str, shape: tuple[int, ...], blocks: list[Block]) -> Sharded:
        try:
            return Sharded(shape, tuple(blocks))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder / '.metadata'}: tensor {key!r}: {error}") from None

    def _shaped_blocks(self, key: str, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[Block]]:
        """The shape of a tensor and its blocks, those of flat parts in their own shape.

        Until 0.15 megatron-core flattened the parts of its distributed optimizer's tensors and cut them where ranks
        end: a tensor has the shape [parts along each dimension of the true shape, elements of a part].
        """
        tensor = self[key]
        blocks = self._blocks(tensor)
        if shape is None or len(shape) + 1 != len(tensor.shape):
            return tensor.shape, [Block(*block) for block in blocks]
        *counts, size = tensor.shape
        part = tuple(whole // count if count else 0 for whole, count in zip(shape, counts, strict=True))
        if math.prod(part) != size:
            return tensor.shape, [Block(*block) for block in blocks]
        flat: dict[tuple[int, ...], list[StoredTensor]] = {}
        for (*at, start), stored in sorted(blocks, key=lambda block: block[0]):
            pieces = flat.setdefault(tuple(at), [])
            if start != sum(piece.shape[0] for piece in pieces) or stored.stride is not None:
                raise CheckpointError(f"{self.folder / '.metadata'}: tensor {key!r} has gaps at {[*at, start]}")
            pieces.append(replace(stored, shape=(math.prod(stored.shape),)))
        for at_part, pieces in flat.items():
            if sum(piece.shape[0] for piece in pieces) != size:
                raise CheckpointError(f"{self.folder / '.metadata'}: tensor {key!r} has gaps at {list(at_part)}")
        return shape, [
            Block(
                tuple(index * length for index, length in zip(at_part, part, strict=True)),
                StoredPieces(part, tuple(pieces)),
            )
            for at_part, pieces in flat.items()
        ]

    def _blocks(self, tensor: DcpTensor) -> list[tuple[tuple[int, ...], StoredTensor]]:
        blocks = []
        for offset, shape, record in tensor.chunks:
            if any(start + size > whole for start, size, whole in zip(offset, shape, tensor.shape, strict=True)):
                raise CheckpointError(
                    f"{self.folder / '.metadata'}: tensor {tensor.key!r} of shape {list(tensor.shape)} has a part of "
                    f"shape {list(shape)} at {list(offset)}"
                )
            stored = self._stored(tensor, shape, record)
            if (stored.shape, stored.dtype) != (shape, tensor.dtype):
                raise CheckpointError(
                    f"{stored.path}: part of tensor {tensor.key!r} is {stored.dtype} {list(stored.shape)}, but "
                    f".metadata says {tensor.dtype} {list(shape)}"
                )
            blocks.append((offset, stored))
        return blocks

    def _stored(self, tensor: DcpTensor, shape: tuple[int, ...], record: _StorageInfo) -> StoredTensor:
        path, start, length = self._locate(tensor.key, record)
        raw = getattr(record, RAW, None)
        if raw is not None and raw[1] == math.prod(shape) * raw[2].itemsize:
            return StoredTensor(path, raw[0], raw[2], shape)
        check = self._checks.setdefault(path.name, once(self._check_file, path))
        try:
            return replace(_open_record(path, start, length), check=check)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        except Exception as error:  # whatever a damaged archive or pickle leads to
            problem = (str(error).splitlines() or [""])[0][:150]
            raise CheckpointError(
                f"{path}: the record of tensor {tensor.key!r} is damaged ({type(error).__name__}: {problem})"
            ) from None

    def _check_file(self, path: Path) -> None:
        """Compare the records of all tensors in a file with their checksums."""
        with path.open("rb") as file:
            for tensor in self.values():
                for _, _, record in tensor.chunks:
                    if record.relative_path == path.name and not record.transform_descriptors:
                        part = cast(IO[bytes], _Part(file, record.offset, record.length))
                        check_archive(path, part, record=f"the record of tensor {tensor.key!r}: ")

    def _locate(self, key: str, record: _StorageInfo) -> tuple[Path, int, int]:
        """The file, offset and length of a record, which is in the file as a whole."""
        path = self.folder / record.relative_path
        if record.transform_descriptors:
            raise CheckpointError(
                f"{path}: {key!r} is transformed ({', '.join(record.transform_descriptors)}), which is not read; save "
                "the checkpoint without extensions"
            )
        if record.relative_path not in self._sizes:
            try:
                self._sizes[record.relative_path] = path.stat().st_size
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing; {key!r} is in it") from None
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        size = self._sizes[record.relative_path]
        if record.offset + record.length > size:
            raise CheckpointError(
                f"{path}: cut off: {key!r} ends at byte {record.offset + record.length}, the file has {size}"
            )
        return path, record.offset, record.length


class _Part(_ReaderView):
    """A range of a file; zipfile looks for the end, which torch's class puts in a wrong place."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(offset + self.len) if whence == os.SEEK_END else super().seek(offset, whence)


def open_dcp(folder: Path) -> Dcp:
    """The tensors in `folder`. Raises CheckpointError if `.metadata` is missing, damaged or not to be trusted."""
    metadata = read_metadata(folder)
    # DCP's own index takes ten times as long to look up
    records = {(index.fqn, tuple(index.offset or ())): record for index, record in metadata.storage_data.items()}
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, _StorageInfo] = {}
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            objects[key] = _record(folder, records, key)
            continue
        assert isinstance(value, TensorStorageMetadata)
        rank, chunks = len(value.size), []
        for chunk in value.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == rank:
                raise CheckpointError(f"{folder / '.metadata'}: the parts of tensor {key!r} have other dimensions")
            record = _record(folder, records, key, tuple(chunk.offsets))
            chunks.append((tuple(chunk.offsets), tuple(chunk.sizes), record))
        tensors[key] = DcpTensor(key, tuple(value.size), value.properties.dtype, tuple(chunks))
    return Dcp(folder, tensors, objects)


def _row(stored: Stored, row: int) -> Stored:
    """A row with a dimension less."""
    if isinstance(stored, StoredPieces):
        return replace(stored.rows(row, row + 1), shape=stored.shape[1:])
    assert isinstance(stored, StoredTensor)
    return stored[row]


def _record(folder: Path, records: _Records, key: str, offset: tuple[int, ...] = ()) -> _StorageInfo:
    found = records.get((key, offset))
    if found is None:
        part = f" at {list(offset)}" if offset else ""
        raise CheckpointError(f"{folder / '.metadata'}: the part of {key!r}{part} is in no file")
    return found


def _open_record(path: Path, start: int, length: int) -> StoredTensor:
    """The tensor that torch.save wrote there. Raises any exception if there is none."""
    with path.open("rb") as file:
        archive = torch._C.PyTorchFileReader(_Part(file, start, length))  # type: ignore[call-overload]
        if archive.has_record("byteorder") and archive.get_record("byteorder") != b"little":
            raise ValueError("big-endian")
        if archive.get_record_size("data.pkl") > MAX_PICKLE:
            raise ValueError("data.pkl is too large")
        pickled = archive.get_record("data.pkl")
        tensor = load_plain(pickled, {_REBUILD, *_STORAGES}, lambda pid: pid)
        if not isinstance(tensor, Placeholder) or tensor.name != _REBUILD:
            raise ValueError("not a tensor")
        (_, storage, name, _, _), first, shape, stride = tensor.args[:4]
        data = archive.get_record_offset(f"data/{name}")
    dtype = _STORAGES[storage.name]
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if min((first, *stride)) < 0 or data + (first + span) * dtype.itemsize > length:
        raise ValueError("data outside its record")
    return StoredTensor(path, start + data + first * dtype.itemsize, dtype, tuple(shape), tuple(stride))
