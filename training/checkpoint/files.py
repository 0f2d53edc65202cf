"""The files of a checkpoint: those of PyTorch's own FileSystemWriter and -Reader, which read them, written and read by
several threads, and hashed while they are written.

sha256 takes longer than most disks (0.4 GB/s where the processor has no instructions for it), and of one file it is the
work of one core. So each rank writes several files; the disk works while the next megabytes are hashed. sha256 is for
people and archives; a load compares XXH3 (128 bits), which finds damage as surely and takes a tenth of the time.
"""

import errno
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

THREADS = 4  # files that a rank writes, reads or hashes at a time: a GPU's share of a node's cores, or fewer
_CHUNK = 1 << 20  # bytes: what fits a core's cache; eight times as many were written at a third of the speed
_SMALLEST = 64 << 20  # bytes: no file is begun for less
_LARGE = 1 << 16  # bytes: of smaller tensors, what torch.save writes around them is not told from them
_RAW = "raw"  # where a tensor's bytes are: (offset in the file, bytes, dtype), beside what the library notes
_FILES = 16  # of a rank, unless its tensors are larger than a sixteenth of them all


class Writer(FileSystemWriter):
    """Writes the tensors of a rank, one at a time and thread on their way through the CPU's memory.

    Raises OSError when the system does not take them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.files: dict[str, dict[str, Any]] = {}
        """`Digests.entry` by name, of the files written by this process."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by the library, on every rank, with what is to be written there."""
        prefix = plan.storage_data.prefix

        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            name = f"{prefix}{number}.distcp"
            with HashedFile(Path(self.path) / name) as file:
                results = [_write_item(file, name, item, planner) for item in items]
            self.files[name] = file.digests.entry()
            return results

        parts = _parts(plan.items)
        with ThreadPoolExecutor(THREADS) as pool, _without_crc32():
            results = [result for part in pool.map(write, range(len(parts)), parts) for result in part]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class Reader(FileSystemReader):
    """Reads several files at a time, and what is wanted whole straight to where it belongs."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by the library, on every rank, with what is needed there."""
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
        """Whether an item is all of what one rank wrote of a tensor, and now in its place."""
        target = planner.resolve_tensor(item).detach()
        start, size, dtype = getattr(self.storage_data[item.storage_index], _RAW, (0, -1, None))
        if (target.nbytes, target.dtype) != (size, dtype):
            return False
        straight = target.device.type == "cpu" and target.is_contiguous()
        tensor = target if straight else torch.empty(target.shape, dtype=dtype)
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        file.seek(start)
        for begin in range(0, size, _CHUNK):
            if file.readinto(view[begin : begin + _CHUNK]) != min(_CHUNK, size - begin):  # type: ignore[attr-defined]
                raise OSError(errno.EIO, "ends early", file.name)
        if not straight:
            target.copy_(tensor)
        planner.commit_tensor(item, target)
        return True


class Digests:
    """What the manifest says of a file, from its bytes as they pass by."""

    def __init__(self) -> None:
        self.size, self.sha256, self.xxh3 = 0, hashlib.sha256(), xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        self.sha256.update(data)
        self.xxh3.update(data)
        self.size += len(data)

    def entry(self) -> dict[str, Any]:
        """`{"size": bytes, "sha256": hex, "xxh3": hex}`."""
        return {"size": self.size, "sha256": self.sha256.hexdigest(), "xxh3": self.xxh3.hexdigest()}


class HashedFile:
    """A new file that is hashed while it is written, and on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests = Digests()
        self.large = (0, 0)
        """Offset and size of the last large piece."""
        self._file: IO[bytes] = path.open("xb")
        self._refused: OSError | None = None

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._refused = self._refused or error
        if self._refused is not None:  # instead of what the library makes of it
            raise OSError(self._refused.errno, self._refused.strerror, str(self.path)) from None

    def write(self, data: Any) -> int:
        """Append bytes; returns their number."""
        view = memoryview(data).cast("B")
        if len(view) >= _LARGE:
            self.large = (self.digests.size, len(view))
        try:
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                self._file.write(chunk)
                if hasattr(os, "posix_fadvise"):  # the disk begins now, not when fsync waits for it
                    os.posix_fadvise(self._file.fileno(), self.digests.size, len(chunk), os.POSIX_FADV_DONTNEED)
                self.digests.update(chunk)
        except OSError as error:
            self._refused = error
            raise
        return len(view)

    def flush(self) -> None:
        """Part of what torch.save asks of a file; nothing is read from this one."""


def _write_item(file: HashedFile, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    tensor = torch.from_numpy(data.detach().cpu().contiguous().numpy())  # no part of a larger one, which would be saved
    start, file.large = file.digests.size, (0, 0)
    torch.save(tensor, file)  # type: ignore[arg-type]
    info = _StorageInfo(name, start, file.digests.size - start)
    if file.large[1] == tensor.nbytes:
        setattr(info, _RAW, (*file.large, tensor.dtype))
    return WriteResult(item.index, info.length, info)


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The tensors of each file, largest first, so that the last ones to be written are small."""
    largest = max(_SMALLEST, sum(map(_bytes, items)) // _FILES)
    parts: list[list[WriteItem]] = []
    room = 0
    for item in sorted(items, key=_bytes, reverse=True):
        if not parts or _bytes(item) > room:
            parts.append([])
            room = largest
        parts[-1].append(item)
        room -= _bytes(item)
    return parts


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save as fast as it is: sha256 guards these files."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
