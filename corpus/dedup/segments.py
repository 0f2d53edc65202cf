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


class SegmentWriter:
    """An open file; see `write_segments`."""

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
    """A file of segments, opened for reading. Raises InputError if it is missing, cut short or changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; run the phase that writes it") from None
        try:
            index = self._index()
        except BaseException:
            self.close()
            raise
        self.info: dict[str, Any] = index["info"]
        self._segments: dict[str, list[list[Any]]] = {}
        for name, *segment in index["segments"]:
            self._segments.setdefault(name, []).append(segment)

    def _index(self) -> dict[str, Any]:
        size = os.fstat(self._descriptor).st_size
        if size < len(_MAGIC) + _TRAILER.size or self.bytes_at(0, len(_MAGIC)) != _MAGIC:
            raise self._damaged("not a file of corpus.dedup, or cut short")
        end = size - _TRAILER.size
        length, checksum = _TRAILER.unpack(self.bytes_at(end, _TRAILER.size))
        index = self.bytes_at(end - length, length) if length <= end else b""
        if xxhash.xxh3_64_intdigest(index) != checksum:
            raise self._damaged("cut short or changed")
        self.checksum = int(checksum)
        """Of the index, which holds the checksums of all segments."""
        content: dict[str, Any] = orjson.loads(index)
        return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> "Segments":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged(self, how: str) -> InputError:
        return InputError(f"{self.path}: {how}; delete it and run the phase that writes it again")

    def each(self, name: str) -> Iterator[NDArray[Any]]:
        """The arrays of a name, one at a time, verified."""
        for dtype, offset, length, checksum in self._segments.get(name, []):
            data = self.bytes_at(offset, length)
            if xxhash.xxh3_64_intdigest(data) != checksum:
                raise self._damaged(f"{name} at byte {offset} is changed")
            yield np.frombuffer(data, dtype=dtype)

    def offsets(self, name: str) -> list[int]:
        """The offsets of a name's arrays in the file."""
        return [offset for _, offset, _, _ in self._segments.get(name, [])]

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Bytes of the file, not verified."""
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:  # one call reads 2 GiB at most
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise self._damaged("cut short")
            data += more
        return data
