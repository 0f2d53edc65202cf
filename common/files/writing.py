"""All-or-nothing writes: `<name>.tmp` is written, fsynced and renamed, or removed if anything fails.

Pipes and devices (/dev/null, /dev/stdout) are opened once and written to directly; see `common.files.outputs`. Every
write error names the file.
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
from common.files.outputs import Destination, locate

_BUFFER = 1 << 15  # bytes


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError raised inside the block; for a full disk, the system gives none."""
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
        with naming(self._path):  # a network file system may report a full disk only now
            super().close()


@dataclass(frozen=True)
class Output:
    """A file that is being written; see `output_files`."""

    path: Path
    """The path as given."""
    target: Path
    """The file that is replaced at the end: `path` with links resolved."""
    temporary: Path
    """The file that is written until then."""
    stream: IO[bytes] | None
    """The open stream if it is written to directly."""

    def open(self) -> IO[bytes]:
        """The empty file, open for writing. Call it once."""
        if self.stream is not None:
            return self.stream
        return io.BufferedWriter(_NamedFile(self.temporary, "w", self.path), _BUFFER)

    def append(self, data: bytes) -> None:
        """Append bytes without keeping a regular file open, because a process may not have a thousand open files."""
        if self.stream is not None:
            self.stream.write(data)
            return
        with _NamedFile(self.temporary, "a", self.path) as raw, io.BufferedWriter(raw, _BUFFER) as file:
            file.write(data)


def open_locked(path: Path, refusal: str) -> IO[bytes]:
    """Open a file for reading and writing, made if it is missing, locked until it is closed.

    Raises InputError with the message `refusal` if another process has it.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(refusal) from None
            except OSError:
                pass  # the file system has no locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its owner has just renamed or removed it: this lock guards nothing


@contextmanager
def output_files(paths: Sequence[Path], regular_only: bool = False) -> Iterator[list[Output]]:
    """Yield one Output per path. All regular files appear when the block succeeds, none of them otherwise.

    Raises InputError for a path that is not writable, and if another process is writing the same files, such as an
    orphan of a killed run; the first regular file's lock guards all of them, and they appear in reverse order.
    `regular_only` refuses streams, for writers that read or rename what they wrote.
    """
    destinations = [locate(path) for path in paths]
    for destination in destinations if regular_only else ():
        if destination.stream:
            raise InputError(
                f"{destination.path}: is not a regular file, which this output must be; choose another one"
            )
    regular = [destination for destination in destinations if not destination.stream]
    folders = dict.fromkeys(destination.target.parent for destination in regular)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if regular:
            first = regular[0].temporary
            refusal = f"{first}: another process is writing it; stop that one, or wait for it"
            stack.enter_context(open_locked(first, refusal))
        try:
            for destination in regular:
                destination.temporary.write_bytes(b"")  # a killed run may have left one
            outputs = [_output(destination) for destination in destinations]
            streams = [output.stream for output in outputs if output.stream is not None]
            for stream in streams:
                stack.callback(_abandon, stream)
            yield outputs
            for stream in streams:
                stream.close()
            for destination in regular:
                fsync(destination.temporary)
            while regular:  # the first one last: its lock is gone with its name
                regular[-1].temporary.replace(regular[-1].target)
                regular.pop()
            for folder in folders:
                fsync(folder)
        except BaseException:
            for destination in reversed(regular):
                destination.temporary.unlink(missing_ok=True)
            raise


def _abandon(stream: IO[bytes]) -> None:
    """Close a stream that is still open, ignoring errors: an earlier error is the one to report."""
    with suppress(OSError):
        stream.close()


def _output(destination: Destination) -> Output:
    if not destination.stream:
        return Output(destination.path, destination.target, destination.temporary, None)
    file = destination.path if destination.descriptor is None else os.dup(destination.descriptor)
    stream = io.BufferedWriter(_NamedFile(file, "w", destination.path), _BUFFER)
    return Output(destination.path, destination.target, destination.target, stream)


@contextmanager
def atomic_paths(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """`output_files` for writers that need paths: yields the temporary ones."""
    with output_files(paths, regular_only=True) as outputs:
        yield [output.temporary for output in outputs]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """`atomic_paths` for one file."""
    with atomic_paths([path]) as (temporary,):
        yield temporary


@contextmanager
def beside(path: Path, suffix: str) -> Iterator[Path]:
    """Yield the path of an additional file: beside a regular output, or in a temporary folder for a stream."""
    if not locate(path).stream:
        yield path.with_name(path.name + suffix)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder, path.name + suffix)


def scratch_file(path: Path) -> IO[bytes]:
    """An unnamed temporary file on the same disk as `path`. Its errors name `path`; it vanishes with the process."""
    with TemporaryFile(dir=path.parent, buffering=0) as file:
        return io.BufferedRandom(_NamedFile(os.dup(file.fileno()), "r+", path), _BUFFER)


def fsync(path: Path) -> None:
    """Flush a file, or the renames inside a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with output_files([path]) as (output,), output.open() as file:
        file.write(text.encode())


def write_json(path: Path, value: object, *, indent: bool = True) -> None:
    """Write `value` as JSON with a trailing newline, atomically; on one line without `indent`."""
    write_text(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None).decode() + "\n")
