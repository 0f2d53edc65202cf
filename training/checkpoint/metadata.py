"""Read the `.metadata` of a torch.distributed.checkpoint (DCP) folder without executing anything in it.

PyTorch's own reader calls `pickle.load`, which runs whatever somebody put into the file. Here the pickle is read as
plain data, checked field by field, and turned into DCP's classes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from common.errors import CheckpointError
from training.checkpoint.unpickling import ForeignClassError, Placeholder, load_plain

RAW = "raw"
"""Attribute of a _StorageInfo that our own writer adds: (offset of the tensor's bytes in the file, size, dtype)."""
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # properties were here before torch 2.3
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PROPERTIES = {f"{_DCP}.metadata.TensorProperties", f"{_SHARDED}.TensorProperties"}
_METADATA = {f"{_DCP}.metadata.Metadata", f"{_MEGATRON}.MCoreMetadata"}
# what files written by torch and megatron-core name; objects of the classes not used below are dropped
_NAMES = frozenset(
    {
        *_METADATA,
        *_PROPERTIES,
        *(
            f"{_DCP}.metadata.{name}"
            for name in (
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_DCP}.filesystem._StorageInfo",
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        f"{_SHARDED}.MEM_FORMAT_ENCODING",
        f"{_MEGATRON}.MCoreSavePlan",
        "torch.serialization._get_layout",
        "torch.device",
        "builtins.getattr",  # how Python 3.11.2 pickles a member of an Enum: a placeholder, too
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")  # the second one since Python 3.13
            for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of the tensors in `folder`: shapes, chunks, and the file, offset and length of each record.

    Planner data, save plans and the place where the checkpoint was written are left out. Raises CheckpointError if the
    file is missing or damaged, names a class that DCP does not write, or points outside the folder.
    """
    path = folder / ".metadata"
    try:
        plain = load_plain(path.read_bytes(), _NAMES)
        return _metadata(plain)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ForeignClassError as error:
        raise CheckpointError(
            f"{path}: names {error}, which no such file contains; nothing was executed, do not trust this checkpoint"
        ) from None
    except Exception as error:  # whatever a damaged pickle leads to
        problem = (str(error).splitlines() or [""])[0][:150]
        raise CheckpointError(f"{path}: damaged or cut off ({type(error).__name__}: {problem})") from None


def _metadata(plain: Any) -> Metadata:
    _check(plain, _METADATA)
    tensors = {_text(key): _stored(value) for key, value in _dict(plain.state_dict_metadata).items()}
    storage = {_index(key): _record(value) for key, value in _dict(plain.storage_data).items()}
    version = getattr(plain, "version", None)
    return Metadata(tensors, None, storage, StorageMeta(), version if isinstance(version, str) else None)


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if value.name == f"{_DCP}.metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    _check(value, {f"{_DCP}.metadata.TensorStorageMetadata"})
    _check(value.properties, _PROPERTIES)
    dtype, _layout, requires_grad, _memory_format, _pinned = value.properties.state
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a type")
    properties = TensorProperties(dtype, requires_grad=bool(requires_grad))
    return TensorStorageMetadata(properties, _size(value.size), [_chunk(chunk) for chunk in value.chunks])


def _chunk(value: Any) -> ChunkStorageMetadata:
    _check(value, {f"{_DCP}.metadata.ChunkStorageMetadata"})
    return ChunkStorageMetadata(_size(value.offsets), _size(value.sizes))


def _index(value: Any) -> MetadataIndex:
    _check(value, {f"{_DCP}.metadata.MetadataIndex"})
    offset, index = getattr(value, "offset", None), getattr(value, "index", None)
    return MetadataIndex(
        _text(value.fqn), None if offset is None else _size(offset), None if index is None else _natural(index)
    )


def _record(value: Any) -> _StorageInfo:
    _check(value, {f"{_DCP}.filesystem._StorageInfo"})
    name = _text(value.relative_path)
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no file name")
    transforms = getattr(value, "transform_descriptors", None)
    info = _StorageInfo(name, _natural(value.offset), _natural(value.length), _texts(transforms))
    raw = getattr(value, RAW, None)
    if raw is not None:
        start, size, dtype = raw
        inside = info.offset <= _natural(start) <= start + _natural(size) <= info.offset + info.length
        if not inside or not isinstance(dtype, torch.dtype):
            raise ValueError(f"data outside its record in {name}")
        setattr(info, RAW, (start, size, dtype))
    return info


def read_tensor_metadata(folder: Path) -> Metadata:
    """`read_metadata` of a checkpoint of ours, which holds tensors alone.

    DCP's planner loads other objects with plain `torch.load`, and its extensions transform records; neither may happen
    here. Raises CheckpointError for a folder with either.
    """
    metadata = read_metadata(folder)
    for key, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            raise CheckpointError(f"{folder / '.metadata'}: {key!r} is no tensor; do not trust this checkpoint")
    for index, record in metadata.storage_data.items():
        if record.transform_descriptors:
            raise CheckpointError(f"{folder / '.metadata'}: {index.fqn!r} is transformed; do not trust this checkpoint")
    return metadata


def _check(value: Any, names: Iterable[str]) -> None:
    if not isinstance(value, Placeholder) or value.name not in names:
        raise ValueError(f"{getattr(value, 'name', type(value).__name__)} in place of {min(names).rpartition('.')[2]}")


def _dict(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a table of tensors")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name that is no text")
    return value


def _texts(values: Any) -> list[str] | None:
    return None if values is None else [_text(value) for value in values]


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number below 0 or none")
    return value


def _size(value: Any) -> torch.Size:
    return torch.Size([_natural(size) for size in value])
