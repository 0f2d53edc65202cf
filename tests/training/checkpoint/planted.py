"""A pickle that touches a file when it is loaded, put into the files of a checkpoint."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from common.files import read_json, write_json


def flip_a_bit(path: Path) -> None:
    """Change one bit of a file, at byte 1000."""
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


class Touch:
    """Unpickled by a reader that trusts it, it makes the folder `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def metadata_of(folder: Path) -> Metadata:
    """The content of a folder that a test made."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def write_metadata(folder: Path, content: Any) -> None:
    """Replace the file, and its hash in our manifest if there is one: anybody can compute it."""
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    renew_manifest(folder)


def renew_manifest(folder: Path) -> None:
    """Bring the sizes and hashes in manifest.json up to date."""
    path = folder / "manifest.json"
    if path.exists():
        manifest = read_json(path)
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
        write_json(path, manifest)


def plant_record(folder: Path, key: str, mark: Path, *, as_bytes: bool = False) -> None:
    """Let the record of `key` be a pickle of `Touch`; with `as_bytes` the key is declared to be an object."""
    record = io.BytesIO()
    torch.save(Touch(mark), record)
    metadata = metadata_of(folder)
    index = next(index for index in metadata.storage_data if index.fqn == key)
    name = metadata.storage_data[index].relative_path
    with (folder / name).open("ab") as file:
        metadata.storage_data[index] = _StorageInfo(name, file.tell(), len(record.getvalue()))
        file.write(record.getvalue())
    if as_bytes:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[type(index)(key)] = metadata.storage_data.pop(index)
    write_metadata(folder, metadata)
