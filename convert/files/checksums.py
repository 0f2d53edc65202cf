"""Compare whole files with the checksums in them or beside them, before the first of their tensors is used.

A .pt file, and each record of a .distcp file, is a zip archive with a CRC32 for each member. It is 0 if torch.save did
not compute it.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO
from zipfile import ZIP_STORED, ZipFile

from common.errors import CheckpointError

MAX_PICKLE = 64 << 20  # bytes; those of a model of 10,000 tensors take 2 MB
_CHUNK = 1 << 20  # bytes per read


def once(compare: Callable[[Path], None], path: Path) -> Callable[[], None]:
    """A check that all tensors of a file share: the first call runs `compare`, and other threads wait for it."""
    lock, done = Lock(), False

    def check() -> None:
        nonlocal done
        with lock:
            if not done:
                compare(path)
                done = True

    return check


def check_archive(path: Path, file: IO[bytes], *, record: str = "", tensors: bool = True) -> None:
    """Compare the members of an archive of torch.save, or those without tensor data, with their CRC32.

    `record` names the archive if it is a part of the file `path`. Raises CheckpointError naming the file and the
    member that is damaged, compressed, or larger than a checkpoint's pickle.
    """
    name = "archive"
    try:
        with ZipFile(file) as archive:
            for member in archive.infolist():
                name, is_tensor = member.filename, "/data/" in member.filename
                if member.compress_type != ZIP_STORED:
                    raise CheckpointError("is compressed; unpack the file, and save it again with torch.save")
                if not is_tensor and member.file_size > MAX_PICKLE:
                    raise CheckpointError(f"has {member.file_size:,} bytes, a checkpoint's at most {MAX_PICKLE:,}")
                if member.CRC and (tensors or not is_tensor):
                    with archive.open(member) as content:
                        while content.read(_CHUNK):
                            pass
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {record}{name} {error}") from None
    except Exception as error:  # whatever a damaged archive leads to
        problem = (str(error).splitlines() or [""])[0].partition(" for file ")[0][:150]
        raise CheckpointError(f"{path}: damaged or cut off ({record}{name}: {problem}); copy it again") from None
