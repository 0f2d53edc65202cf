"""Damage to a checkpoint, and a pickle that touches a file when it is loaded."""

import os
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata


def flip_a_bit(path: Path) -> None:
    """Change one bit of a file, at byte 1000."""
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def spoil(folder: Path, damage: str) -> None:
    """Damage a checkpoint."""
    file = next(folder.glob("*.safetensors"))
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "file missing":
        file.unlink()
    elif damage == "byte flipped":
        flip_a_bit(file)
    else:
        file.write_bytes(file.read_bytes()[:-1])


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
    """Replace the file."""
    (folder / ".metadata").write_bytes(pickle.dumps(content))
