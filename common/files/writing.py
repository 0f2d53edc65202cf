"""All-or-nothing writes: `<name>.tmp` is filled, fsynced and renamed, and removed when anything goes wrong.

What is no regular file (a pipe, /dev/null, /dev/stdout) is opened once and written through; see `common.files.outputs`.
Every error of a write names the file.
"""

import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import orjson

from common.errors import InputError
from common.files.outputs import Place, locate

_BUFFER = 1 << 15  # bytes


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError inside the block the name of its file: the system has none for a write that finds no space."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


class _NamedFile(io.FileIO):
    """An open file whose errors name it."""

    def __init__(self, file: Path | int, mode: str, path: Path) -> None:
        self._path = path
        super().__init__(file, mode)

    def write(self, data: Any, /) -> int:
        with naming(self._path):
            return super().write(data)

    def close(self) -> None:
        with naming(self._path):  # a network file system may find a full disk only now
            super().close()


@dataclass(frozen=True)
class Output:
    """A file that is being written; see `output_files`."""

    path: Path
    """As it was named."""
    target: Path
    """What is replaced in the end: `path` with its links followed."""
    temporary: Path
    """Where a regular file can be read until then."""
    stream: IO[bytes] | None
    """Open where it is written through."""

    def open(self) -> IO[bytes]:
        """The file, empty, for writing. Once a file."""
        if self.stream is not None:
            return self.stream
        return io.BufferedWriter(_NamedFile(self.temporary, "w", self.path), _BUFFER)

    def append(self, data: bytes) -> None:
        """Add bytes, without holding a regular file open: a thousand are more than a process may have."""
        if self.stream is not None:
            self.stream.write(data)
            return
        with _NamedFile(self.temporary, "a", self.path) as raw, io.BufferedWriter(raw, _BUFFER) as file:
            file.write(data)


def lock(file: IO[bytes], refusal: str) -> None:
    """Hold an open file for this process until it is closed; InputError with `refusal` when another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(refusal) from None
    except OSError:
        pass  # a file system without locks


@contextmanager
def output_files(paths: Sequence[Path], regular_only: bool = False) -> Iterator[list[Output]]:
    """Yield what to write to for each path; when the block ends well, all regular files appear, otherwise none.

    Raises InputError for a folder and the like, and when another process is writing the same files (an orphan of a
    killed run, say); only the first regular file is held open, and guards the others. `regular_only` is for writers
    that read or rename what they wrote: it refuses streams.
    """
    places = [locate(path) for path in paths]
    for place in places if regular_only else ():
        if place.stream:
            raise InputError(f"{place.path}: is not a regular file, which this output must be; choose another one")
    regular = [place for place in places if not place.stream]
    folders = dict.fromkeys(place.target.parent for place in regular)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if regular:
            first = regular[0]
            guard = stack.enter_context(open(first.temporary, "ab"))
            lock(guard, f"{first.temporary}: another process is writing it; stop that one, or wait for it")
        try:
            for place in regular:
                place.temporary.write_bytes(b"")  # what a killed run left
            outputs = [_output(place) for place in places]
            streams = [output.stream for output in outputs if output.stream is not None]
            for stream in streams:
                stack.callback(_abandon, stream)
            yield outputs
            for stream in streams:
                stream.close()
            for place in regular:
                fsync(place.temporary)
            for place in regular:
                place.temporary.replace(place.target)
            for folder in folders:
                fsync(folder)
        except BaseException:
            for place in regular:
                place.temporary.unlink(missing_ok=True)
            raise


def _abandon(stream: IO[bytes]) -> None:
    """Close what is still open; an error that came before is the one to tell."""
    with suppress(OSError):
        stream.close()


def _output(place: Place) -> Output:
    if not place.stream:
        return Output(place.path, place.target, place.temporary, None)
    file = place.path if place.descriptor is None else os.dup(place.descriptor)
    stream = io.BufferedWriter(_NamedFile(file, "w", place.path), _BUFFER)
    return Output(place.path, place.target, place.target, stream)


@contextmanager
def atomic_paths(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """`output_files` for writers that need names: yield the temporary ones."""
    with output_files(paths, regular_only=True) as outputs:
        yield [output.temporary for output in outputs]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """`atomic_paths` for one file."""
    with atomic_paths([path]) as (temporary,):
        yield temporary


@contextmanager
def beside(path: Path, suffix: str) -> Iterator[Path]:
    """Yield the name of a file that accompanies an output: beside it, or beside a stream in a temporary folder."""
    if not locate(path).stream:
        yield path.with_name(path.name + suffix)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder, path.name + suffix)


def scratch_file(path: Path) -> IO[bytes]:
    """A file without a name on the disk of `path`, which errors name; it vanishes with the process."""
    with TemporaryFile(dir=path.parent, buffering=0) as file:
        return io.BufferedRandom(_NamedFile(os.dup(file.fileno()), "r+", path), _BUFFER)


def fsync(path: Path) -> None:
    """Wait until the disk has a file, or the renames inside a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file, all or nothing."""
    with output_files([path]) as (output,), output.open() as file:
        file.write(text.encode())


def write_json(path: Path, value: object, *, indent: bool = True) -> None:
    """Write `value` as JSON with a trailing newline, all or nothing; on one line without `indent`."""
    write_text(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None).decode() + "\n")
