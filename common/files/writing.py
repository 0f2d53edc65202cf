"""All-or-nothing writes: `<name>.tmp` is written, fsynced and renamed, or removed on failure.

An output is a regular file, or does not exist yet; links are followed, and everything else is
refused. Every write error names the file. A folder of results is replaced or removed as a whole, if
it has no foreign files:

    own = re.compile(r"[0-9]+\\.pairs").fullmatch
    if foreign := first_foreign_file(folder, own): ...    # a file that we did not write
    remove_own(folder, own)
    with replace_folder(folder, check) as new: ...        # write the files to `new`, a marker last

A cache, which any reader may make again, is written by `cache_path`: nobody waits or is refused.
"""

import fcntl
import glob
import io
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

import orjson
import psutil

from common.errors import InputError

_BUFFER = 1 << 15  # bytes
_SMALL_FILE = 10.0  # seconds that `write_text` waits for another writer


def target_of(path: Path) -> Path:
    """The regular file that an output replaces, with links resolved, or InputError."""
    try:
        usable = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        usable = True
    except OSError:  # below a file, or not accessible
        usable = False
    if not usable:
        raise InputError(f"{path}: cannot be written: an output must be a regular file in a folder")
    return Path(os.path.realpath(path))


def file_identity(path: Path) -> tuple[object, ...]:
    """A key that is equal for two paths to the same file or folder."""
    try:
        status = os.stat(path)
    except OSError:
        return (os.path.realpath(path),)
    return status.st_dev, status.st_ino


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise InputError for an output that cannot be written, or is another output or an input."""
    taken: dict[tuple[object, ...], Path] = {}
    for path in filter(None, outputs):
        identity = file_identity(target_of(path))
        if identity in taken:
            raise InputError(f"{path}: is the same file as the output {taken[identity]}; name two different files")
        taken[identity] = path
    for path in inputs:
        identity = file_identity(Path("/dev/stdin") if str(path) == "-" else path)
        if identity in taken:
            raise InputError(f"{taken[identity]}: would overwrite the input {path}; choose another output")


def lock(file: IO[Any], wait: bool = False) -> bool:
    """Lock an open file until it is closed, or its process ends.

    Returns False if another process has locked it, unless `wait`; True without locks in the file
    system.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def locked_run(run: Path) -> Iterator[None]:
    """Hold RUN/records/lock. Raises InputError if another process holds it."""
    (run / "records").mkdir(parents=True, exist_ok=True)
    with open(run / "records/lock", "a+") as file:
        if not lock(file):
            time.sleep(1)  # the other process locks first, then writes who it is
            file.seek(0)
            raise InputError(f"{run} is locked: {file.read()} works on it; wait for it, or stop it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError raised in the block: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def scratch_file(folder: Path) -> IO[bytes]:
    """An empty file without a name in `folder`; its errors name the folder."""
    with TemporaryFile(dir=folder) as file:
        return io.BufferedRandom(_NamedFile(os.dup(file.fileno()), "r+", folder), _BUFFER)


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
    target: Path
    """`path` with links resolved."""

    @property
    def temporary(self) -> Path:
        """The file that replaces `target` in the end."""
        return self.target.with_name(self.target.name + ".tmp")

    def open(self, mode: str = "w") -> IO[bytes]:
        """The temporary file, open for writing. Call it once."""
        return io.BufferedWriter(_NamedFile(self.temporary, mode, self.path), _BUFFER)

    def append(self, data: bytes) -> None:
        """Append bytes and close the file: a process may not have a thousand open files."""
        with self.open("a") as file:
            file.write(data)


def open_locked(path: Path, refusal: str, patience: float = 0) -> IO[bytes]:
    """Open a file for reading and writing, created if missing, locked until it is closed.

    Raises InputError(refusal) if another process holds the lock for more than `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            if not lock(file):
                if time.monotonic() >= end:
                    raise InputError(refusal)
                time.sleep(0.01)
            else:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        return file
        except BaseException:
            file.close()
            raise
        file.close()  # another process holds it, or has renamed or removed the file


@contextmanager
def output_files(paths: Sequence[Path], patience: float = 0) -> Iterator[list[Output]]:
    """Yield one Output per path. All files appear when the block succeeds, none otherwise.

    Raises InputError for a path that is not writable, and if another process, such as an orphan of
    a killed run, writes the same files for more than `patience` seconds. The first file's lock
    guards all, so they appear in reverse order.
    """
    outputs = [Output(path, target_of(path)) for path in paths]
    left = list(outputs)
    folders = dict.fromkeys(output.target.parent for output in outputs)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if outputs:
            first = outputs[0].temporary
            refusal = f"{first}: another process is writing it; stop that one, or wait for it"
            stack.enter_context(open_locked(first, refusal, patience))
        try:
            for output in outputs:
                output.temporary.write_bytes(b"")  # a killed run may have left one
            yield outputs
            for output in outputs:
                fsync(output.temporary)
            while left:  # the first file last: renaming releases its lock
                left[-1].temporary.replace(left[-1].target)
                left.pop()
            for folder in folders:
                fsync(folder)
        except BaseException:
            for output in reversed(left):
                output.temporary.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """`output_files` for a writer that needs a path: yields the temporary file's."""
    with output_files([path]) as (output,):
        yield output.temporary


@contextmanager
def cache_path(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which becomes `path` when the block succeeds.

    Several processes may write a cache at once, each its own file; the last rename wins, and
    readers see a whole file. Removes the files of killed writers on this machine.
    """
    target = target_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    own = f"{target.name}.{socket.gethostname()}-"
    for left in target.parent.glob(f"{glob.escape(own)}*.tmp"):
        if not psutil.pid_exists(int(left.name.removeprefix(own).split("-")[0])):
            left.unlink(missing_ok=True)
    temporary = target.with_name(f"{own}{os.getpid()}-{uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        fsync(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Flush a file, or the renames inside a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically. Writers take turns; the last one's text stays."""
    with output_files([path], _SMALL_FILE) as (output,), output.open() as file:
        file.write(text.encode())


def write_json(path: Path, value: object, *, indent: bool = True) -> None:
    """Write JSON with a trailing newline, atomically; on one line without `indent`."""
    write_text(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None).decode() + "\n")


def first_foreign_file(folder: Path, own: Callable[[str], object]) -> Path | None:
    """The first entry of a folder, by name, that is no regular file with a name of ours, or None.

    Folders and symbolic links count as foreign, as does `folder` if it is a link or no folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder
    entries = sorted(folder.iterdir())
    return next((path for path in entries if path.is_symlink() or not path.is_file() or not own(path.name)), None)


def remove_own(folder: Path, own: Callable[[str], object]) -> None:
    """Remove a folder of our files, if it exists. Raises InputError if it has a foreign file."""
    if not folder.is_symlink() and not folder.exists():
        return
    if foreign := first_foreign_file(folder, own):
        raise InputError(f"{foreign}: was not made by this tool, and {folder} is in its way; move it elsewhere")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def swap_folder(new: Path, folder: Path, old: Path, check: Callable[[Path], None] = lambda old: None) -> None:
    """Rename `new`, whose files are on disk, to `folder`, and an older `folder` to `old`.

    If that or `check(old)` fails, the older folder gets its name back.
    """
    replaces = folder.exists()
    if replaces:
        folder.rename(old)
    try:
        if replaces:
            check(old)
        new.rename(folder)
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    fsync(folder.parent)


@contextmanager
def replace_folder(folder: Path, check: Callable[[Path], None] = lambda old: None) -> Iterator[Path]:
    """Yield an empty folder; when the block succeeds, it is flushed to disk and becomes `folder`.

    The block works in FOLDER.partial/new. `check(old)` is called before an older folder is deleted;
    if it raises, `folder` stays as it was. What a killed command left is removed; an older folder
    that it had moved away is put back. Raises InputError if another process writes this folder.
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
            for path in (new, *new.rglob("*")):
                fsync(path)
            swap_folder(new, folder, old, check)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if folder.exists():  # otherwise the older one could not be put back
                shutil.rmtree(old, ignore_errors=True)  # `check` found only files of ours in it
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                work.rmdir()
