"""Find lines and paragraphs (units) that occur too often in the corpus.

Units are equal if their texts are in dedup's form. Both files are segments (corpus/segments.py):

| file | segments | content |
|---|---|---|
| units of a shard | 0 … 255, many of each | UNIT, whose hash begins with this byte |
| repeats of all shards | hash, first, times | u64, one row per hash that repeats, sorted by hash |

`first` is `shard << 32 | document` of the first occurrence, `times` the number of occurrences in
all shards. The info of the repeats has `counted`: the documents of each shard by its name, in the
order of the shards' numbers.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import InputError
from common.progress import Meter
from common.settings import RepeatsSettings
from corpus.dedup.shingles import RULE, normalised
from corpus.segments import Segments, write_segments

UNIT = np.dtype([("hash", "<u8"), ("key", "<u8"), ("document", "<u4")])
"""Hash of a unit, hash of its document's id and text, index of the document in the shard."""
CHUNK = 1 << 20  # units sorted and written at a time: 20 MB
RANGES = 256
_BYTES_PER_UNIT = 250  # if none repeats: two tables of 32 bytes, joined, sorted copies, masks

Numbers = NDArray[np.uint64]


class Unit(NamedTuple):
    """A line or a paragraph: lines `start` to `end` - 1 of its document."""

    start: int
    end: int
    hash: int


def find_units(lines: Sequence[str], settings: RepeatsSettings) -> list[Unit]:
    """The units of a document of `min_bytes`, in order; a paragraph comes before its lines."""
    spans, start = list[tuple[int, int]](), 0
    for index, line in enumerate([*lines, ""]):
        if line and not line.isspace():
            continue
        if "paragraphs" in settings.units and (index > start + 1 or (index > start and "lines" not in settings.units)):
            spans.append((start, index))
        if "lines" in settings.units:
            spans += ((number, number + 1) for number in range(start, index))
        start = index + 1
    texts = [normalised("\n".join(lines[start:end])).encode() for start, end in spans]
    hashed = ((*span, xxhash.xxh3_64_intdigest(text), len(text)) for span, text in zip(spans, texts, strict=True))
    return [Unit(*unit) for *unit, size in hashed if size >= settings.min_bytes]


class _Table(NamedTuple):
    """Distinct hashes in ascending order, with key and row of the first occurrence, and count."""

    hash: Numbers
    key: Numbers
    first: Numbers
    times: Numbers


def _merged(tables: Sequence[_Table]) -> _Table:
    hashes, key, row, times = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    order = np.argsort(hashes)
    hashes, key, row = hashes[order], key[order], row[order]
    first = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    smallest = np.minimum.reduceat(key, first)
    row[key != np.repeat(smallest, np.diff(first, append=len(key)))] = np.iinfo(np.uint64).max
    return _Table(hashes[first], smallest, np.minimum.reduceat(row, first), np.add.reduceat(times[order], first))


def _read(files: Sequence[Path], part: int, parts: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """(shard, units) with hashes in part `part` of their range."""
    names = range(part * RANGES // parts, ((part + 1) * RANGES - 1) // parts + 1)
    for shard, path in enumerate(files):
        with Segments(path) as file:
            arrays = [array.view(UNIT) for name in names for array in file.each(str(name))]
        units = np.concatenate([np.empty(0, dtype=UNIT), *arrays])
        # the high bits of a hash choose its part
        yield shard, units[(units["hash"] >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32) == part]


def _repeated(files: Sequence[Path], part: int, parts: int, max_count: int) -> _Table:
    """The hashes of one part that occur more than `max_count` times."""
    waiting, size = [_Table(*np.empty((4, 0), dtype=np.uint64))], 0
    for shard, units in _read(files, part, parts):
        row = np.uint64(shard << 32) + units["document"]
        waiting.append(_Table(units["hash"], units["key"], row, np.ones_like(row)))
        size += len(row)
        if size > max(CHUNK, len(waiting[0].hash)):  # at most as much as the table
            waiting, size = [_merged(waiting)], 0
    table = _merged(waiting) if size else waiting[0]
    return _Table(*(column[table.times > max_count] for column in table))


def write_repeats(files: Sequence[Path], output: Path, settings: RepeatsSettings) -> None:
    """Write the repeats of all shards, given their units.

    Raises InputError for units of other settings.
    """
    files, units, counted = sorted(files, key=lambda path: path.name), 0, dict[str, int]()
    for path in files:
        with Segments(path) as file:
            if file.info.get("settings") != fingerprint(settings):
                raise InputError(
                    f"{path}: made by another version or with other settings; run `corpus.repeats count` again"
                )
            units += file.info["units"]
            counted[path.stem] = file.info["documents"]
    per_part = 1 + int(settings.memory_gb * 1e9) // _BYTES_PER_UNIT
    parts, waiting = 1 + units // per_part, list[_Table]()
    with (
        write_segments(output, {"counted": counted, "rule": RULE}) as written,
        Meter("repeats sum", "parts", parts) as meter,
    ):
        for part in range(parts):
            waiting.append(_repeated(files, part, parts, settings.max_count))
            if part == parts - 1 or sum(len(table.hash) for table in waiting) > per_part:  # few and long segments
                for name in ("hash", "first", "times"):
                    written.append(name, np.concatenate([getattr(table, name) for table in waiting]))
                waiting.clear()
            meter.advance()


def fingerprint(settings: RepeatsSettings) -> dict[str, Any]:
    """The rule and settings of units, which the files of all phases share."""
    return {"rule": RULE, "units": sorted(set(settings.units)), "min_bytes": settings.min_bytes}


class Repeats:
    """The repeats of all shards in a memory map, for one shard.

    shard       its number
    documents   those it had when it was counted

    Raises InputError if the shard was not counted.
    """

    def __init__(self, path: Path, shard: str) -> None:
        file = Segments(path)
        if file.info.get("rule") != RULE:
            raise InputError(
                f"{path}: made by another version of this toolkit; run `corpus.repeats count` and `sum` again"
            )
        counted: dict[str, int] = file.info.get("counted", {})
        if shard not in counted:
            raise InputError(f"{path}: made without the shard {shard}; run `corpus.repeats sum` again")
        self.shard, self.documents = list(counted).index(shard), counted[shard]
        self._segments = list(zip(*(file.mapped(name) for name in ("hash", "first", "times")), strict=True))

    def find(self, hashes: Numbers) -> tuple[Numbers, Numbers]:
        """`first` and `times` of each hash, shape (hashes,); both 0 if it does not repeat."""
        first, times = np.zeros((2, len(hashes)), dtype=np.uint64)
        for known, known_first, known_times in self._segments:
            nearest = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            same = known[nearest] == hashes
            first[same], times[same] = known_first[nearest[same]], known_times[nearest[same]]
        return first, times
