"""Files of named arrays, appended one by one and verified by checksums when read.

| bytes | content |
|---|---|
| 8 | `DEDUPSG1` |
| … | the segments: raw little-endian arrays, one after the other |
| n | the index, JSON: {"info": {…}, "segments": [[name, dtype, offset, bytes, xxh3_64], …]} |
| 16 | u64 n, u64 xxh3_64 of the index |

A name may occur many times; reading it yields one array after the other.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from common.errors import InputError
from common.files import output_files

_MAGIC = b"DEDUPSG1"
_TRAILER = struct.Struct("<QQ")
_WRITERS = {
    ".signatures": "dedup signatures",
    ".pairs": "dedup bands",
    ".edges": "dedup verify",
    ".clusters": "dedup clusters",
    ".removed": "dedup clusters",
    ".units": "repeats count",
    ".repeats": "repeats sum",
}
"""By suffix, the phase that writes a file."""


class SegmentWriter:
    """Appends arrays to an open file; see `write_segments`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._segments: list[list[Any]] = []
        self._end = self._file.write(_MAGIC)  # a pipe does not know its position

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Add an array; an empty one adds nothing."""
        if len(values):
            data = np.ascontiguousarray(values).view(np.uint8).data
            self._segments.append([name, values.dtype.str, self._end, len(data), xxhash.xxh3_64_intdigest(data)])
            self._end += self._file.write(data)

    def close(self, info: Mapping[str, Any]) -> None:
        """Write the index."""
        index = orjson.dumps({"info": info, "segments": self._segments})
        self._file.write(index + _TRAILER.pack(len(index), xxhash.xxh3_64_intdigest(index)))


@contextmanager
def write_segments(path: Path, info: Mapping[str, Any]) -> Iterator[SegmentWriter]:
    """Write a file of segments, whole or not at all; `info` is read when the block ends."""
    with output_files([path]) as (output,), output.open() as file:
        writer = SegmentWriter(file)
        yield writer
        writer.close(info)


class Segments:
    """Reads a file of segments. Raises InputError if it is missing, cut short or changed.

    The file is open only inside `with`: a process may open fewer files than a corpus has shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        with self:
            end = os.fstat(self._descriptor).st_size - _TRAILER.size
            if end < len(_MAGIC) or self._bytes_at(0, len(_MAGIC)) != _MAGIC:
                raise self.damaged("not a file of segments, or cut short")
            length, checksum = _TRAILER.unpack(self._bytes_at(end, _TRAILER.size))
            index = self._bytes_at(end - length, length) if length <= end else b""
            if xxhash.xxh3_64_intdigest(index) != checksum:
                raise self.damaged("cut short or changed")
        self.checksum: int = checksum
        """Checksum of the index, which holds the checksums of all segments."""
        content = orjson.loads(index)
        self.info: dict[str, Any] = content["info"]
        self._segments: dict[str, list[list[Any]]] = {}
        for name, *segment in content["segments"]:
            self._segments.setdefault(name, []).append(segment)

    def __enter__(self) -> "Segments":
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise InputError(f"{self.path}: no such file; run {self._phase} first") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def damaged(self, how: str) -> InputError:
        """The error for a file that cannot be used."""
        return InputError(f"{self.path}: {how}; delete it and run {self._phase} again")

    @property
    def _phase(self) -> str:
        writer = _WRITERS.get(self.path.suffix)
        return f"`corpus.{writer}`" if writer else "the phase that writes it"

    def array(self, name: str, number: int) -> NDArray[Any]:
        """An array of a name, verified."""
        dtype, offset, length, checksum = self._segments[name][number]
        data = self._bytes_at(offset, length)
        self.verify(data, checksum)
        return np.frombuffer(data, dtype=dtype)

    def each(self, name: str) -> Iterator[NDArray[Any]]:
        """The arrays of a name, one at a time, verified."""
        return (self.array(name, number) for number in range(len(self._segments.get(name, []))))

    def mapped(self, name: str) -> list[NDArray[Any]]:
        """The arrays of a name in memory maps, not verified."""
        return [
            np.asarray(np.memmap(self.path, kind, "r", offset, length // np.dtype(kind).itemsize))
            for kind, offset, length, _ in self._segments.get(name, [])
        ]

    def items(self, name: str, number: int, start: int, end: int) -> NDArray[Any]:
        """Items `start` to `end` of an array, which the caller verifies."""
        kind, offset, length, _ = self._segments[name][number]
        size = np.dtype(kind).itemsize
        if not 0 <= start <= end <= length // size:
            raise self.damaged("changed")
        return np.frombuffer(self._bytes_at(offset + start * size, (end - start) * size), dtype=kind)

    def verify(self, data: bytes, checksum: int) -> None:
        """Raise InputError unless the data has this checksum."""
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise self.damaged("changed")

    def _bytes_at(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:  # one call reads at most 2 GiB
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise self.damaged("cut short")
            data += more
        return data
