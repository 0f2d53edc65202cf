"""Decides how an output path is written, and refuses outputs that clash, before anything is read or written.

A regular file is replaced by renaming `<name>.tmp` beside it; links are followed. A pipe, a character device
(/dev/null) and an open descriptor (/dev/stdout, /dev/fd/N) are written to directly. Everything else is refused.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError

_DESCRIPTORS = re.compile(r"/dev/fd|/proc/(self|thread-self|[0-9]+)(/task/[0-9]+)?/fd")
_MAX_LINKS = 40  # as in the Linux kernel

Identity = tuple[object, ...]
"""Equal for two paths to the same file."""


def descriptor_of(path: Path) -> int | None:
    """N if a path names an open descriptor of this process: /dev/stdin, /dev/stdout, /dev/fd/N; else None."""
    for _ in range(_MAX_LINKS):
        folder = os.path.realpath(path.parent)
        if path.name.isdigit() and _DESCRIPTORS.fullmatch(folder):
            own = folder.split("/")[2] in ("fd", "self", "thread-self", str(os.getpid()))
            return int(path.name) if own else None
        try:
            path = Path(folder, os.readlink(path))
        except OSError:
            return None
    return None


@dataclass(frozen=True)
class Destination:
    """Where the bytes of an output go."""

    path: Path
    """The path as given."""
    target: Path
    """`path` with links resolved."""
    stream: bool
    """Whether it is written to directly instead of being replaced."""
    descriptor: int | None
    """The open descriptor of this process that a stream refers to."""
    device: bool
    """Whether it is a character device, which several options may name."""

    @property
    def temporary(self) -> Path:
        """The name of a regular file until it is complete."""
        return self.target.with_name(self.target.name + ".tmp")

    def identities(self) -> list[Identity]:
        """Identities that no other file of the command may have: the file's and its temporary file's."""
        if self.descriptor is not None:
            return [_identity_of(os.fstat(self.descriptor))]
        return [identity(self.target)] if self.stream else [identity(self.target), identity(self.temporary)]


def _identity_of(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def identity(path: Path) -> Identity:
    """The identity of a file, with symbolic and hard links resolved; its full name if it does not exist yet."""
    try:
        return _identity_of(os.stat(path))
    except OSError:
        return (os.path.realpath(path),)


def locate(path: Path) -> Destination:
    """Where an output goes. Raises InputError for a folder, a block device, a socket, and a path below a file."""
    descriptor = descriptor_of(path)
    try:
        found = os.stat(path) if descriptor is None else os.fstat(descriptor)
    except FileNotFoundError:
        return Destination(path, Path(os.path.realpath(path)), stream=False, descriptor=None, device=False)
    except NotADirectoryError:
        raise InputError(f"{path}: lies below a file, not below a folder; choose another output") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; choose another output") from None
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder; name a file in it")
    if stat.S_ISBLK(mode) or (stat.S_ISSOCK(mode) and descriptor is None):
        raise InputError(f"{path}: is a {'block device' if stat.S_ISBLK(mode) else 'socket'}; choose another output")
    if descriptor is None and stat.S_ISREG(mode):
        return Destination(path, Path(os.path.realpath(path)), stream=False, descriptor=None, device=False)
    return Destination(path, path, stream=True, descriptor=descriptor, device=stat.S_ISCHR(mode))


def exists(path: Path) -> bool:
    """Whether an output or its temporary file exists already, so that it could also be an input. False for devices."""
    found = locate(path)
    return not found.device and (found.stream or found.target.exists() or found.temporary.exists())


def is_stdout(path: Path) -> bool:
    """Whether a path is standard output; False if standard output is /dev/null."""
    try:
        found = os.fstat(1)
    except OSError:
        return False
    destination = locate(path)
    null = stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
    return destination.stream and not null and _identity_of(found) in destination.identities()


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise InputError for an output that cannot be written, equals another output, or would overwrite an input."""
    taken: dict[Identity, Path] = {}
    for path in outputs:
        if path is None:
            continue
        destination = locate(path)
        for found in [] if destination.device else destination.identities():
            if found in taken:
                raise InputError(f"{path}: is the same file as the output {taken[found]}; name two different files")
            taken[found] = path
    for path in inputs:
        try:
            found = _identity_of(os.fstat(0)) if str(path) == "-" else identity(path)
        except OSError:  # no stdin
            continue
        if found in taken:
            raise InputError(f"{taken[found]}: would overwrite the input {path}; choose another output")
