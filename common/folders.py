"""Remove and replace whole folders of results, if they have no foreign files.

own = re.compile(r"[0-9]+\\.pairs").fullmatch
if foreign := first_foreign_file(folder, own): ...    # a file that we did not write
remove_own(folder, own)
with replace_folder(folder, check) as new: ...        # write the files to `new`
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import InputError
from common.files import fsync, open_locked


def first_foreign_file(folder: Path, own: Callable[[str], object]) -> Path | None:
    """The first entry of a folder, by name, that is not a regular file with one of our names, or None.

    Folders and symbolic links count as foreign, and so does `folder` itself if it is a link or not a folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder
    entries = sorted(folder.iterdir())
    return next((path for path in entries if path.is_symlink() or not path.is_file() or not own(path.name)), None)


def remove_own(folder: Path, own: Callable[[str], object]) -> None:
    """Remove a folder of our files if it exists. Raises InputError and removes nothing if it has a foreign file."""
    if not folder.is_symlink() and not folder.exists():
        return
    if foreign := first_foreign_file(folder, own):
        raise InputError(f"{foreign}: was not made by this tool, and {folder} is in its way; move it elsewhere")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def swap_folder(new: Path, folder: Path, old: Path, check: Callable[[], None] = lambda: None) -> None:
    """Rename `new` to `folder`, and an older `folder` to `old`; if that or `check` fails, the older one is restored."""
    replaces = folder.exists()
    if replaces:
        folder.rename(old)
    try:
        check()
        new.rename(folder)
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    fsync(folder.parent)


@contextmanager
def replace_folder(folder: Path, check: Callable[[Path, Path], None]) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends without an error.

    The work is done in FOLDER.partial/. `check(old, new)` is called before an older folder is deleted; if it raises,
    `folder` stays as it was. What a killed command left is removed, and an older folder that it had moved away is put
    back. Raises InputError if another process writes the same folder.
    """
    work = folder.with_name(f"{folder.name}.partial")
    new, old, lock = work / "new", work / "old", work / "lock"
    work.mkdir(parents=True, exist_ok=True)
    with open_locked(lock, f"{folder}: another process is writing it; stop that one, or wait for it"):
        try:
            if old.exists() and not folder.exists():
                old.rename(folder)
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
            new.mkdir()
            yield new
            for path in new.rglob("*"):
                fsync(path)
            swap_folder(new, folder, old, lambda: check(old, new) if old.exists() else None)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if folder.exists():  # otherwise the older one could not be put back
                shutil.rmtree(old, ignore_errors=True)  # `check` found only files of ours in it
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                work.rmdir()
