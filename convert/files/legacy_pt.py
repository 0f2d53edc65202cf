"""Find the tensors in a .pt file of the format before torch 1.6 without reading their data.

torch.load reads such a file as a whole, with the optimizer's state of a training of 2019. Its layout:

| content | form |
|---|---|
| magic number | pickle |
| protocol version, 1001 | pickle |
| byte order and sizes of C types | pickle |
| the object; a storage is ("storage", type, key, location, elements, view) | pickle |
| the keys of the storages, in the order of the file | pickle |
| for each key: the number of elements (little-endian int64), then the data | bytes |
"""

import os
import struct
from pathlib import Path
from typing import IO, Any

import torch
from torch._weights_only_unpickler import Unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from common.errors import CheckpointError


def load_meta(path: Path) -> Any:
    """The object, with tensors on the meta device whose storages have `_checkpoint_offset`, as torch.load's fake ones.

    Classes must be allowed as for torch.load(weights_only=True). Raises CheckpointError if the file is cut off.
    """
    storages: dict[Any, tuple[Any, int]] = {}  # by key: the storage and its number of elements

    def storage_of(saved: Any) -> Any:
        _kind, kind, key, _location, count, view = saved
        if view is not None:
            raise CheckpointError(f"{path}: storages that are views, as torch 0.x wrote them; save it again with torch")
        if key not in storages:
            untyped = torch.UntypedStorage(count * kind.dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
            typed: Any = torch.storage.TypedStorage
            storages[key] = typed(wrap_storage=untyped, dtype=kind.dtype, _internal=True), count
        return storages[key][0]

    with path.open("rb") as file:
        if _load(file) != MAGIC_NUMBER or _load(file) != PROTOCOL_VERSION:
            raise CheckpointError(f"{path}: not a .pt file")
        if not _load(file)["little_endian"]:
            raise CheckpointError(f"{path}: written on a big-endian machine")
        unpickler = _unpickler(file)
        unpickler.persistent_load = storage_of
        content = unpickler.load()
        keys, size = _load(file), os.fstat(file.fileno()).st_size
        for key in keys:
            storage, count = storages[key]
            start = file.tell() + 8
            end = start + count * storage.dtype.itemsize
            if end > size:
                raise CheckpointError(f"{path}: cut off (the data of its last tensors is missing)")
            if struct.unpack("<q", file.read(8)) != (count,):
                raise CheckpointError(f"{path}: damaged (a storage of another size than its tensor)")
            storage.untyped()._checkpoint_offset = start
            file.seek(end)
    return content


def _unpickler(file: IO[bytes]) -> Any:
    return Unpickler(file, encoding="utf-8")


def _load(file: IO[bytes]) -> Any:
    return _unpickler(file).load()
