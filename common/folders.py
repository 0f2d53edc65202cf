"""Folders of results that are removed as a whole: only ones in which every file is known to be the tool's own.

own = re.compile(r"[0-9]+\\.pairs").fullmatch
if stranger := first_stranger(folder, own): ...        # something that somebody else put there
remove_own(folder, own)
"""

from collections.abc import Callable
from pathlib import Path

from common.errors import InputError


def first_stranger(folder: Path, own: Callable[[str], object]) -> Path | None:
    """The first entry of a folder, by name, that is not a plain file with one of our names; None where all are ours.

    Folders and symbolic links are strangers, and so is `folder` itself where it is a link or no folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder
    entries = sorted(folder.iterdir())
    return next((path for path in entries if path.is_symlink() or not path.is_file() or not own(path.name)), None)


def remove_own(folder: Path, own: Callable[[str], object]) -> None:
    """Remove a folder of our files, if it exists. Raises InputError, with nothing removed, when one is not ours."""
    if not folder.is_symlink() and not folder.exists():
        return
    if stranger := first_stranger(folder, own):
        raise InputError(f"{stranger}: was not made by this tool, and {folder} is in its way; move it elsewhere")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
