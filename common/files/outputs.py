"""Which file a path of the user stands for, before anything is read or written.

A regular file is replaced by a rename of `<name>.tmp` beside it, links followed. A pipe, a character device
(/dev/null) and an open descriptor (/dev/stdout, /dev/fd/N) are written through. Everything else is refused.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError

_DESCRIPTORS = re.compile(r"/dev/fd|/proc/(self|thread-self|[0-9]+)(/task/[0-9]+)?/fd")
_MAX_LINKS = 40  # as the kernel has it

Identity = tuple[object, ...]
"""Equal for two paths that lead to one file."""


def descriptor_of(path: Path) -> int | None:
    """N of a path that stands for an open descriptor of this process: /dev/stdin, /dev/stdout, /dev/fd/N."""
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
class Place:
    """Where the bytes of an output go."""

    path: Path
    """As it was named."""
    target: Path
    """`path` with its links followed."""
    stream: bool
    """Written through, not replaced."""
    descriptor: int | None
    """Of a stream that this process has open already."""
    device: bool
    """A character device: it may be named by any number of options."""

    @property
    def temporary(self) -> Path:
        """The name of a regular file until it is whole."""
        return self.target.with_name(self.target.name + ".tmp")

    def identities(self) -> list[Identity]:
        """What no other file of the command may be: the file, and its temporary name."""
        if self.descriptor is not None:
            return [_identity_of(os.fstat(self.descriptor))]
        return [identity(self.target)] if self.stream else [identity(self.target), identity(self.temporary)]


def _identity_of(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def identity(path: Path) -> Identity:
    """The file behind a path, through links of both kinds; of one that is not there yet, its full name."""
    try:
        return _identity_of(os.stat(path))
    except OSError:
        return (os.path.realpath(path),)


def locate(path: Path) -> Place:
    """Where an output goes. InputError for a folder, a block device, a socket, and a path below a file."""
    descriptor = descriptor_of(path)
    try:
        found = os.stat(path) if descriptor is None else os.fstat(descriptor)
    except FileNotFoundError:
        return Place(path, Path(os.path.realpath(path)), stream=False, descriptor=None, device=False)
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
        return Place(path, Path(os.path.realpath(path)), stream=False, descriptor=None, device=False)
    return Place(path, path, stream=True, descriptor=descriptor, device=stat.S_ISCHR(mode))


def exists(path: Path) -> bool:
    """Whether an output, or its temporary file, is there already and could be an input as well; devices are none."""
    place = locate(path)
    return not place.device and (place.stream or place.target.exists() or place.temporary.exists())


def is_stdout(path: Path) -> bool:
    """Whether writing to a path is writing to standard output (/dev/null counts as neither)."""
    try:
        found = os.fstat(1)
    except OSError:
        return False
    place = locate(path)
    null = stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
    return place.stream and not null and _identity_of(found) in place.identities()


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise InputError for an output that cannot be written, is another output too, or would overwrite an input."""
    taken: dict[Identity, Path] = {}
    for path in outputs:
        if path is None:
            continue
        place = locate(path)
        for found in [] if place.device else place.identities():
            if found in taken:
                raise InputError(f"{path}: is the same file as the output {taken[found]}; give each one of its own")
            taken[found] = path
    for path in inputs:
        try:
            found = _identity_of(os.fstat(0)) if str(path) == "-" else identity(path)
        except OSError:  # no stdin
            continue
        if found in taken:
            raise InputError(f"{taken[found]}: would overwrite the input {path}; choose another output")
