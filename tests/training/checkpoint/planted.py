"""A pickle that touches a file when it is loaded, put into the files of a checkpoint."""

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
