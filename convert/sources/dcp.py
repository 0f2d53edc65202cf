"""Folders of torch.distributed.checkpoint (DCP): `.metadata`, and records in `.distcp` files.

A record is an archive of torch.save inside a file; its tensors' data is located, not read.
PyTorch's own reader calls `pickle.load` on `.metadata`, which runs whatever somebody put into the
file. Here the file is read as plain data, and every value is checked.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from common.errors import CheckpointError
from convert.pt import ForeignClassError, Placeholder, check_archive, damage_named, load_archive, load_plain, once
from convert.sources.source import Sharded
from training.checkpoint.files import Block, StoredTensor

T = TypeVar("T")
Size = tuple[int, ...]
# names in files of torch and megatron-core; each becomes a placeholder
_NAMES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.sharded_tensor.metadata.",  # properties were here before torch 2.3
    "megatron.core.dist_checkpointing.strategies.torch.",
    "torch.serialization._get_layout",
    "torch.device",
    "builtins.getattr",  # how Python 3.11.2 pickles a member of an Enum
    "pathlib.",
)


class DcpTensor(NamedTuple):
    """A tensor of the folder."""

    dtype: torch.dtype
    shape: Size
    parts: list[tuple[Size, Size]]
    """Offset and shape of each."""


class Record(NamedTuple):
    """The place of a part of a tensor, or of an object."""

    file: str
    offset: int
    length: int


def read_metadata(folder: Path) -> tuple[dict[str, DcpTensor], list[str], dict[tuple[str, Size], Record]]:
    """The content of `.metadata`: tensors by key, keys of objects, records by key and offset.

    CheckpointError if it is damaged, names a class that DCP does not write, or points elsewhere.
    """
    path = folder / ".metadata"
    with damage_named(path):
        try:
            plain = load_plain(BytesIO(path.read_bytes()), _NAMES)
        except ForeignClassError as error:
            raise CheckpointError(
                f"{path}: names {error}, which no such file contains; nothing was executed, do not trust it"
            ) from None
        state = _checked(plain.state_dict_metadata, dict)
        tensors = {_checked(key, str): _tensor(value) for key, value in state.items() if _is_tensor(value)}
        records = {
            (_checked(index.fqn, str), _size(getattr(index, "offset", None) or ())): _record(value)
            for index, value in _checked(plain.storage_data, dict).items()
        }
        places = sorted(records.values())
        if any(
            last.file == next_.file and last.offset + last.length > next_.offset for last, next_ in pairwise(places)
        ):
            raise ValueError("two records at the same place")
        return tensors, [_checked(key, str) for key in state if key not in tensors], records


def _is_tensor(value: Any) -> bool:
    kind = _checked(value, Placeholder).name.rpartition(".")[2]
    if kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
        raise ValueError(f"{kind} is neither a tensor nor an object")
    return kind == "TensorStorageMetadata"


def _tensor(value: Any) -> DcpTensor:
    dtype, shape = _checked(value.properties.state[0], torch.dtype), _size(value.size)
    parts = [(_size(chunk.offsets), _size(chunk.sizes)) for chunk in value.chunks]
    if any(len(size) != len(shape) for part in parts for size in part):
        raise ValueError("a tensor with parts of other dimensions")
    return DcpTensor(dtype, shape, parts)


def _record(value: Any) -> Record:
    name = _checked(value.relative_path, str)
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no file name")
    if transforms := getattr(value, "transform_descriptors", None):
        raise ValueError(f"{name} is transformed by {transforms}, which is not read; save it without extensions")
    return Record(name, _natural(value.offset), _natural(value.length))


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} is expected")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number below 0 or none")
    return value


def _size(value: Any) -> Size:
    return tuple(_natural(size) for size in value)


class Dcp:
    """The tensors of a folder by their keys; only `.metadata` has been read, see `read_metadata`.

    CheckpointError names the tensor and the file if a part is missing, damaged, or overlaps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors, self.objects, self._records = read_metadata(folder)
        self.shapes = {key: tensor.shape for key, tensor in self._tensors.items()}
        self.files = {folder / ".metadata"}
        """Every file that was read."""
        self._checks: dict[Path, Callable[[], None]] = {}

    def sharded(self, key: str, shape: tuple[int, ...] | None = None) -> Sharded:
        """A tensor as the blocks in the files; give its true `shape` if its parts may be flat.

        Until 0.15 megatron-core flattened the parts of its distributed optimizer and cut them where
        ranks end: the shape is [parts along each dimension of the true shape, elements of a part].
        """
        *counts, size = stored_shape = self.shapes[key] or (0,)
        chunks = [Block(offset, self._stored(key, offset, size)) for offset, size in self._tensors[key].parts]
        cut = tuple(whole // max(count, 1) for whole, count in zip(shape or (), counts, strict=False))
        try:
            if not shape or len(counts) != len(shape) or math.prod(cut) != size:
                return Sharded(self.shapes[key], tuple(chunks))
            flat: dict[tuple[int, ...], list[Block]] = {}
            for (*at, start), stored in chunks:
                piece = replace(stored, shape=(math.prod(stored.shape),))
                flat.setdefault(tuple(map(mul, at, cut)), []).append(Block((start,), piece))
            parts = {offset: Sharded(stored_shape[-1:], tuple(pieces)).view(cut) for offset, pieces in flat.items()}
            return Sharded(shape, tuple(block for offset, part in parts.items() for block in part.moved(offset)))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder / '.metadata'}: tensor {key!r}: {error}") from None

    def load_object(self, key: str) -> Any:
        """An object that is no tensor, read by `load_archive`."""
        return self._load(key, ())

    def _stored(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> StoredTensor:
        stored, dtype = self._load(key, offset), self._tensors[key].dtype
        if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{self.folder / self._records[key, offset].file}: a part of tensor {key!r} is not the {dtype} "
                f"{list(shape)} that {self.folder / '.metadata'} says; one of the two is damaged"
            )
        return stored

    def _load(self, key: str, offset: tuple[int, ...]) -> Any:
        record = self._records.get((key, offset))
        path = self.folder / record.file if record else None
        if record is None or path is None or not path.is_file():
            where = f"in {path.name}, which is missing" if path else "in no file"
            raise CheckpointError(f"{self.folder / '.metadata'}: the part of {key!r} at {list(offset)} is {where}")
        self.files.add(path)
        check = self._checks.setdefault(path, once(self._check_file, path))
        with self._metadata_named():
            return load_archive(path, record.offset, record.length, check, f"the record of {key!r}: ")

    def _check_file(self, path: Path) -> None:
        """Compare the records of all tensors in a file with their checksums."""
        with self._metadata_named():
            for (key, _), record in self._records.items():
                if record.file == path.name and key in self._tensors:
                    check_archive(path, record.offset, record.length, f"the record of {key!r}: ")

    @contextmanager
    def _metadata_named(self) -> Iterator[None]:
        """Add `.metadata` to an error: the places are from there, so it may be the damaged file."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; or {self.folder / '.metadata'}, which says where it is, is damaged"
            ) from None
