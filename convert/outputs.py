"""Whether a command may write to the folder that --output names."""

from collections.abc import Callable
from pathlib import Path

from common.errors import InputError


def check_output(folder: Path, checkpoint: Path, first_foreign: Callable[[Path], Path | None], force: bool) -> None:
    """InputError if writing `folder` would harm the input, what the user stands in, or files that are not ours.

    `first_foreign` finds a file in a folder that no command of ours wrote; `force` allows to replace an older result.
    """
    target, source = folder.resolve(), checkpoint.resolve()
    if source.is_relative_to(target):
        raise InputError(f"{folder}: would overwrite the input {checkpoint}; choose another --output")
    if folder.is_symlink():
        raise InputError(f"{folder}: a symbolic link; give the folder that it points to as --output")
    if Path.cwd().is_relative_to(target):
        raise InputError(f"{folder}: the working directory is in there; give a new folder as --output")
    if target.is_relative_to(source) and any(path.name.startswith("iter_") for path in (target, *target.parents)):
        raise InputError(f"{folder}: is inside the checkpoint; choose another --output")
    if folder.is_dir():
        check_older(folder, folder, first_foreign(folder), force)


def check_older(folder: Path, found: Path, foreign: Path | None, force: bool) -> None:
    """InputError unless the older result of `folder`, which lies in `found`, may be replaced."""
    if foreign:
        name = foreign.relative_to(found)
        raise InputError(
            f"{folder / name}: not a file that this command wrote; choose another --output, or move it away"
        )
    if not force and any(found.iterdir()):
        raise InputError(f"{folder}: exists already; --force replaces it")
