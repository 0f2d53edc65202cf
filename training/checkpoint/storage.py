"""DCP storage that reads and writes with several threads and hashes as it writes.

PyTorch's own FileSystemReader reads these files, too. Its writer stays unused: with one thread it takes four times as
long, and with several it loses an exception that a thread raises, so that a full disk looks like success.
"""

import errno
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from training.checkpoint.metadata import RAW, read_tensor_metadata

THREADS = 4  # files that a rank writes, reads or hashes at a time: at most one GPU's share of a node's cores
_CHUNK = 1 << 20  # bytes per write: fits a core's cache; 8 MB chunks were written at half of the speed
_WRITE_BACK = 8 << 20  # bytes after which the kernel is told to write to the disk, so that little is left for fsync
_MIN_FILE = 64 << 20  # bytes: a rank starts a second file only above this
_MIN_RAW = 1 << 16  # bytes: torch.save's own records are smaller, so a larger write is the tensor's data
_MAX_FILES = 16  # per rank, unless single tensors are larger than a sixteenth of the rank's total


class ThreadedWriter(FileSystemWriter):
    """Writes a rank's tensors with several threads; each thread copies one tensor at a time to the CPU.

    Raises OSError when a file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.files: dict[str, dict[str, Any]] = {}
        """Manifest entries of the files that this process wrote, by name."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan (called by DCP)."""
        prefix = plan.storage_data.prefix

        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            name = f"{prefix}{number}.distcp"
            with HashedFile(Path(self.path) / name) as file:
                results = [_write_item(file, name, item, planner) for item in items]
            self.files[name] = file.entry()
            return results

        parts = _split_into_files(plan.items)
        # torch 2.11 has one setting for the process, torch 2.13 one for each thread
        with without_crc32(), ThreadPoolExecutor(THREADS, initializer=set_crc32_options, initargs=(False,)) as pool:
            results = [result for part in pool.map(write, range(len(parts)), parts) for result in part]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class ThreadedReader(FileSystemReader):
    """Reads several files at a time, and whole tensors directly into their target memory; executes nothing in them.

    Raises CheckpointError at once if the folder's `.metadata` cannot be read or trusted.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_tensor_metadata(folder)  # DCP would hide its error behind another one

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The content of `.metadata` (called by DCP)."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the plan (called by DCP)."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read_parts = super().read_data

        def read(name: str) -> None:
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                parts = [item for item in by_file[name] if not self._read_whole(file, item, planner)]
            if parts:
                read_parts(replace(plan, items=parts), planner)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(read, by_file):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_whole(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> bool:
        """Read an item that is a whole stored tensor into its target; False if it is only a part of one."""
        target = planner.resolve_tensor(item).detach()
        start, size, dtype = getattr(self.storage_data[item.storage_index], RAW, (0, -1, None))
        if (target.nbytes, target.dtype) != (size, dtype):
            return False
        direct = target.device.type == "cpu" and target.is_contiguous()
        tensor = target if direct else torch.empty(target.shape, dtype=dtype)
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        file.seek(start)
        for begin in range(0, size, _CHUNK):
            if file.readinto(view[begin : begin + _CHUNK]) != min(_CHUNK, size - begin):  # type: ignore[attr-defined]
                raise OSError(errno.EIO, "ends early", file.name)
        if not direct:
            target.copy_(tensor)
        planner.commit_tensor(item, target)
        return True


class HashedFile:
    """A new file that is hashed while it is written, and fsynced when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.large = (0, 0)
        """Offset and size of the last large write."""
        self._hash = xxhash.xxh3_128()
        self._file: IO[bytes] = path.open("xb")
        self._flushed = 0  # bytes that the kernel was told to write to the disk
        self._failure: OSError | None = None

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._failure = self._failure or error
        if self._failure is not None:  # torch.save raises a RuntimeError instead
            raise OSError(self._failure.errno, self._failure.strerror, str(self.path)) from None

    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest: `{"size": bytes, "xxh3": hex}`."""
        return {"size": self.size, "xxh3": self._hash.hexdigest()}

    def write(self, data: Any) -> int:
        """Append bytes; returns their number."""
        view = memoryview(data).cast("B")
        if len(view) >= _MIN_RAW:
            self.large = (self.size, len(view))
        try:
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                self._file.write(chunk)
                self._hash.update(chunk)
                self.size += len(chunk)
                if self.size - self._flushed >= _WRITE_BACK:
                    self._start_write_back()
        except OSError as error:
            self._failure = error
            raise
        return len(view)

    def _start_write_back(self) -> None:
        if hasattr(os, "posix_fadvise"):  # pages that are not on the disk yet stay in memory
            os.posix_fadvise(self._file.fileno(), self._flushed, self.size - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size

    def flush(self) -> None:
        """Do nothing; torch.save requires the method."""


def _write_item(file: HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    # through NumPy: torch.save would write the whole storage of a view
    tensor = torch.from_numpy(data.detach().cpu().contiguous().numpy())
    file.large = (0, 0)
    info = append_record(file, name, tensor)
    if file.large[1] == tensor.nbytes:
        setattr(info, RAW, (*file.large, tensor.dtype))
    return WriteResult(item.index, info.length, info)


def append_record(file: HashedFile, name: str, content: Any) -> _StorageInfo:
    """Append `content` to the file `name` as torch.save writes it; returns where it is."""
    start = file.size
    torch.save(content, file)  # type: ignore[arg-type]
    return _StorageInfo(name, start, file.size - start)


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _split_into_files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The tensors of each file, largest first, so that the threads finish at about the same time."""
    limit = max(_MIN_FILE, sum(map(_nbytes, items)) // _MAX_FILES)
    files: list[list[WriteItem]] = []
    room = 0
    for item in sorted(items, key=_nbytes, reverse=True):
        if not files or _nbytes(item) > room:
            files.append([])
            room = limit
        files[-1].append(item)
        room -= _nbytes(item)
    return files


@contextmanager
def without_crc32() -> Iterator[None]:
    """Skip torch.save's CRC32: the manifest's hash covers the file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def first_error(failure: CheckpointException) -> BaseException:
    """The error behind a DCP failure, which is equal on all ranks; an OSError is preferred."""
    errors = [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])


@contextmanager
def without_process_group_warning() -> Iterator[None]:
    """Silence DCP's warning about a missing process group, which it prints even with `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
