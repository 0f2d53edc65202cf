"""The columns of a chunk of documents, sorted by hash for range reads.

Column 0 has the hashes of the normalised texts, column 1 + B those of band B. Segments of a chunk:

| name | dtype | content |
|---|---|---|
| hashes | u64 (columns, documents) | the hashes of each column, in ascending order |
| rows | ROW (columns, documents) | per hash, its document: exact hash, key, row in the chunk |
| ends | i64 (columns, buckets) | where each bucket ends; high bits of a hash choose its bucket |
| sums | u64 (columns, buckets, 2) | xxh3_64 of the bucket's hashes and of its rows |
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus.segments import Segments, SegmentWriter

Hashes = NDArray[np.uint64]

ROW = np.dtype([("exact", "<u8"), ("key", "<u8"), ("row", "<u4")])
_BUCKET = 512  # documents on average, 14 kB: what a range reads too much at either end


def bounds(part: int, parts: int) -> tuple[int, int]:
    """The high 32 bits in part `part` of `parts`: the first, and the one after the last."""
    return -(-(part << 32) // parts), -(-((part + 1) << 32) // parts)


def write_columns(file: SegmentWriter, hashes: Hashes, exact: Hashes, key: Hashes) -> None:
    """Append the columns of a chunk; `hashes` has shape (documents, columns)."""
    count, columns = hashes.shape
    buckets = _buckets(count)
    table, rows = np.empty((columns, count), dtype=np.uint64), np.empty((columns, count), dtype=ROW)
    ends, sums = np.empty((columns, buckets), dtype=np.int64), np.empty((columns, buckets, 2), dtype=np.uint64)
    for column in range(columns):
        order = np.argsort(hashes[:, column], kind="stable")
        table[column] = hashes[order, column]
        rows[column]["exact"], rows[column]["key"], rows[column]["row"] = exact[order], key[order], order
        bucket = (table[column] >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
        ends[column] = np.searchsorted(bucket, np.arange(buckets, dtype=np.uint64), side="right")
        for kind, values in enumerate((table[column], rows[column])):
            parts = np.split(values, ends[column, :-1])
            sums[column, :, kind] = [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]
    for name, values in (("hashes", table), ("rows", rows), ("ends", ends), ("sums", sums)):
        file.append(name, values.reshape(-1))


def _buckets(count: int) -> int:
    return max(1, count // _BUCKET)


def read_column(
    shard: Segments, chunk: int, count: int, column: int, limits: tuple[int, int], wanted: Hashes | None = None
) -> tuple[Hashes, NDArray[np.void]]:
    """The hashes between some `bounds` and their ROWs, of a chunk of `count` documents, verified.

    With `wanted`, only the hashes that are in it.
    """
    low, high = limits
    buckets = _buckets(count)
    first, last = low * buckets >> 32, ((high - 1) * buckets >> 32) + 1  # buckets
    place = column * buckets
    ends = shard.items("ends", chunk, place + max(first - 1, 0), place + last)
    ends = ends if first else np.concatenate([[0], ends])
    sums = shard.items("sums", chunk, 2 * (place + first), 2 * (place + last)).reshape(-1, 2)

    def read(name: str, kind: int) -> NDArray[Any]:
        start, end = int(ends[0]), int(ends[-1])
        values = shard.items(name, chunk, column * count + start, column * count + end)
        for number, checksum in enumerate(sums[:, kind].tolist()):
            shard.verify(values[ends[number] - start : ends[number + 1] - start].tobytes(), checksum)
        return values

    hashes: Hashes = read("hashes", 0)
    begin, end = np.searchsorted(hashes >> np.uint64(32), [low, high])
    inside = np.arange(begin, end)
    if wanted is not None:
        inside = inside[np.isin(hashes[begin:end], wanted)]
    if not len(inside):
        return hashes[inside], np.empty(0, dtype=ROW)
    return hashes[inside], read("rows", 1).view(ROW)[inside]
