"""PREFIX.ngrams finds every verbatim copy in a dataset of 8 or more tokens of a text.

    ngrams = open_ngrams(prefix, dtype, content_of(prefix))
    matches = ngrams.matches(query, tokens, starts, lengths)
    spans = longest_spans(matches, 0, len(query))

Every fifth position of PREFIX.bin is listed by a hash of the 4 tokens from there on. Any 8 tokens
in a row hold such a position among their first five, with its 4 tokens. The text around each listed
position is compared token by token.
"""

# PREFIX.ngrams is a file of segments (corpus/segments.py). Position i is token 5 * i of PREFIX.bin.
#
#   content    in its info: the content of PREFIX.bin (`corpus.index.content_of`)
#   positions  in its info: the number of positions that have 4 tokens
#   part       in its info: positions per part, at most 2^25
#
# Segments of each part of n positions, with b = max(0, bits of n - 6):
#
#   begins     u32[2^b + 1]   where the positions of each bucket begin, and n
#   places     u32[n]         position in its part, plus 2^25 times the 7 bits of its hash after the
#                             bucket's; ascending in each bucket
#
# Hash of 4 tokens: the sum of each times its number in _FACTORS, mod 2^64. Its first b bits are the
# bucket.

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.console import note
from common.errors import InputError
from common.files import cache_path, lock
from common.progress import Meter
from corpus.index.layout import ENTRIES, suffixed
from corpus.segments import Segments, SegmentWriter

SHORTEST = 8  # tokens of a match
_STEP, _GRAM = 5, 4  # a match of 8 holds 4 tokens from a multiple of 5 on: 4 + (5 - 1) = 8
_BITS = 25  # of a position; by the other 7 of 32, 1 of 128 wrong positions of a bucket is compared
_PART = 1 << _BITS  # 168 million tokens, which take 0.4 GB while they are sorted
_BLOCK = 1 << 12  # candidates in memory at a time, each with the whole text
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)

Integers = npt.NDArray[np.int64]


class Match(NamedTuple):
    """Tokens [first, end) of a text, which a document has from the dataset's token `place` on."""

    first: int
    end: int
    place: int
    places: int
    """The number of places with just this extent; of a span, the number that hold it."""
    dataset: int = 0


def open_ngrams(prefix: Path, dtype: npt.DTypeLike, content: str, path: Path | None = None) -> "Ngrams":
    """The index of PREFIX.bin at `path` (default PREFIX.ngrams), made if none has this content."""
    path = path or suffixed(prefix, ".ngrams")
    with suffixed(prefix, ".bin").open("rb") as tokens:
        lock(tokens, wait=True)  # another process may be making it, which takes minutes
        with suppress(InputError):  # missing, damaged, or of an older version
            if (ngrams := Ngrams(path)).content == content:
                return ngrams
        write_ngrams(path, suffixed(prefix, ".bin"), np.dtype(dtype), content)
        return Ngrams(path)


def write_ngrams(path: Path, tokens: Path, dtype: np.dtype[Any], content: str, part: int = _PART) -> None:
    """Write the index of a PREFIX.bin, in parts of `part` positions: 12 bytes of memory each."""
    size = tokens.stat().st_size // dtype.itemsize
    positions = (size + 1) // _STEP
    note(f"{path}: made once for this dataset of {size:,} tokens, about {4.2 * positions / 1e6:,.1f} MB")
    meter = Meter("index of 8-grams", "positions", positions)
    with cache_path(path) as temporary, temporary.open("wb") as file, meter:
        writer = SegmentWriter(file)
        for first, count, bits in _parts(positions, part):
            values = np.empty(count, np.uint64)
            for begin in range(0, count, ENTRIES):
                numbers = np.arange(begin, min(count, begin + ENTRIES), dtype=np.uint64)
                offset = (first + begin) * _STEP * dtype.itemsize
                hashes = _hashes(np.fromfile(tokens, dtype, _STEP * len(numbers) - 1, offset=offset), _STEP)
                values[begin : begin + ENTRIES] = hashes >> (32 + _BITS - bits) << _BITS | numbers
                meter.advance(len(numbers))
            values.sort()
            begins = np.searchsorted(values, np.arange(2**bits + 1, dtype=np.uint64) << 32)
            writer.append("begins", begins.astype("<u4"))
            writer.append("places", values.astype("<u4"))
        writer.close({"content": content, "positions": positions, "part": part})


def _parts(positions: int, part: int) -> Iterator[tuple[int, int, int]]:
    """First position, number of positions and bits of the bucket's number, of each part."""
    for first in range(0, positions, part):
        count = min(part, positions - first)
        yield first, count, max(0, count.bit_length() - 6)


def _hashes(tokens: npt.NDArray[Any], step: int) -> Any:
    """The hashes, uint64, of the 4 tokens at every `step`-th index."""
    starts = np.arange(0, len(tokens) - _GRAM + 1, step)
    columns = [tokens[starts + index].astype(np.uint64) for index in range(_GRAM)]
    return sum(column * np.uint64(factor) for column, factor in zip(columns, _FACTORS, strict=True))


class Ngrams:
    """The index in a memory map."""

    def __init__(self, path: Path) -> None:
        file = Segments(path)
        self.content: str = file.info["content"]
        parts = _parts(file.info["positions"], file.info["part"])
        self._parts = list(zip(parts, file.mapped("begins"), file.mapped("places"), strict=True))

    def matches(
        self, query: Integers, tokens: npt.NDArray[Any], starts: Integers, lengths: Integers, dataset: int = 0
    ) -> list[Match]:
        """The longest possible matches of `query` (Q,) with `tokens` (T,), one per extent.

        Documents have these starts and lengths, (D,). Memory does not grow with the dataset.
        """
        extents: dict[tuple[int, int], tuple[int, int]] = {}
        for asked, hashed in enumerate(_hashes(query, 1).tolist()):
            for listed in self._listed(hashed):
                for first, end, place in _extended(query, asked, listed, tokens, starts, lengths).tolist():
                    before, places = extents.get((first, end), (place, 0))
                    extents[first, end] = min(before, place), places + 1
        return [Match(*extent, *where, dataset) for extent, where in sorted(extents.items())]

    def _listed(self, hashed: int) -> Iterator[Integers]:
        """The listed positions of a hash, and a few of other hashes."""
        for (first, _, bits), begins, places in self._parts:
            bucket, rest = divmod(hashed >> (32 + _BITS - bits), 1 << (32 - _BITS))
            run = places[begins[bucket] : begins[bucket + 1]]
            low, high = np.searchsorted(run >> _BITS, [rest, rest + 1]).tolist()
            for begin in range(low, high, _BLOCK):
                numbers = run[begin : min(high, begin + _BLOCK)] & (_PART - 1)
                yield (numbers.astype(np.int64) + first) * _STEP


def _extended(
    query: Integers, asked: int, listed: Integers, tokens: npt.NDArray[Any], starts: Integers, lengths: Integers
) -> Integers:
    """The matches of query[asked] with tokens[listed], shape (M, 3): first, end and place of each.

    A match counts once, at its first listed position: at most 4 of its tokens are before that.
    """
    # at few positions the token before or after the 4 is equal, too, and at few of those 8 tokens
    near = [tokens.take(listed + step, mode="clip") == query.take(asked + step, mode="clip") for step in (-1, _GRAM)]
    listed, around = listed[near[0] | near[1]], np.arange(1 - _STEP, SHORTEST)
    same = tokens.take(listed[:, None] + around, mode="clip") == query.take(asked + around, mode="clip")
    listed = listed[np.any([same[:, begin : begin + SHORTEST].all(axis=1) for begin in range(_STEP)], axis=0)]
    begins, columns = listed[:, None] - asked, np.arange(len(query))
    documents = np.searchsorted(starts, listed, side="right") - 1
    low = starts[documents, None] - begins
    high = low + lengths[documents, None]
    wrong = (tokens.take(begins + columns, mode="clip") != query) | (columns < low) | (columns >= high)
    first = np.where(wrong & (columns <= asked), columns, -1).max(axis=1) + 1
    end = np.where(wrong & (columns >= asked), columns, len(query)).min(axis=1)
    whole = (end - first >= SHORTEST) & (asked - first < _STEP)
    return np.asarray(np.stack([first, end, begins[:, 0] + first], axis=1)[whole])


def longest_spans(matches: list[Match], begin: int, end: int) -> list[Match]:
    """Select matches without overlap, the longest first.

    Of matches of one length, the first in the text; of its places, the first.
    """
    cut = [
        match._replace(first=first, end=min(end, match.end), place=match.place + first - match.first)
        for match in matches
        if min(end, match.end) - (first := max(begin, match.first)) >= SHORTEST
    ]
    if not cut:
        return []
    best = min(cut, key=lambda match: (match.first - match.end, match.first, match.dataset, match.place))
    best = best._replace(places=sum(match.places for match in cut if match[:2] == best[:2]))
    return [*longest_spans(cut, begin, best.first), best, *longest_spans(cut, best.end, end)]
