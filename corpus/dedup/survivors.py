"""Phase 4: which documents of a group are kept, and which kept document each other one resembles.

The documents of a group are taken in order: those of earlier runs, then by `key`, the longest
first. A document is removed if a kept one of its group is at or above the threshold; otherwise it
is kept. It names the most similar of the kept documents with which phase 3 has compared it; if
there is none, texts are read, and it names the most similar of all kept documents of the group. Of
equally similar documents the first is named.

Two constants limit the work in groups of tens of thousands of different texts: a document is
compared with the last `_KEPT_BYTES` of kept ones, which are the nearest in length, and with at most
`_COMPARED` that may reach the threshold. If no comparison removes it, it is kept.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.files import scratch_file
from common.progress import Meter
from common.settings import DedupSettings
from corpus.dedup.pairs import Rows, read_texts, text_of
from corpus.dedup.shingles import Shingles, jaccard, parities, shingles
from corpus.dedup.signatures import Signatures

MEMBER = np.dtype(
    [("root", "<i8"), ("row", "<i8"), ("size", "<i8"), ("key", "<u8"), ("exact", "<u8"), ("id_bytes", "<i8")]
)
"""A document that has duplicates: `root` names its group."""
EDGE = np.dtype([("one", "<i8"), ("other", "<i8"), ("similarity", "<f8")])
"""Rows of two documents at or above the threshold."""

Members = NDArray[np.void]
"""In ascending order of their rows; of dtype MEMBER."""
Edges = NDArray[np.void]
"""Of dtype EDGE."""

_KEPT_BYTES = 1 << 26  # bitmaps of kept texts: 65,536 of 4,000 characters, 16 times as many of 250
_COMPARED = 64
_LEAST_BITS, _MOST_BITS = 1 << 9, 1 << 17  # of a bitmap: two to four per character
_BLOCK = 1 << 15  # words of bitmaps compared at a time: 256 KB fit the L2 cache of a core
_BYTES_PER_CHARACTER = 4  # of a text in memory, at most


class Choice(NamedTuple):
    """What becomes of each member."""

    survivor: Rows
    """Index of the kept member that it resembles, its own if it is kept."""
    similarity: NDArray[np.float64]
    """To its survivor."""
    compared: int
    """Texts that were read and compared with kept ones."""
    incomplete: int
    """Of these, texts that were kept although a limit left some comparisons out."""


def choose(members: Members, edges: Edges, signatures: Signatures, settings: DedupSettings, folder: Path) -> Choice:
    """Choose the survivors of some whole groups; scratch files are in `folder`."""
    new = members["row"] >= signatures.earlier
    order = np.lexsort((members["exact"], members["key"], new, members["root"]))
    # documents with equal texts share the number of their text; texts are numbered in the order
    _, first, text = np.unique(members["exact"][order], return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))
    heads = order[np.sort(first)]
    text_of_member = np.empty(len(members), dtype=np.int64)
    text_of_member[order] = number[text]
    ends = np.searchsorted(members["row"], np.stack([edges["one"], edges["other"]]))
    links = edges.copy()
    links["one"], links["other"] = np.sort(text_of_member[ends], axis=0)
    walk = _Walk(members[heads], links, signatures.earlier)
    compared, incomplete = _compare(walk, walk.undecided(), signatures, settings, folder)
    survivor = heads[np.array(walk.leader, dtype=np.int64)[text_of_member]]
    similarity = np.array(walk.similarity, dtype=np.float64)[text_of_member]
    survivor = np.where(new, survivor, np.arange(len(members)))  # every earlier document is kept
    return Choice(survivor, similarity, compared, incomplete)


class _Walk:
    """Texts in the order in which they are decided, with the kept text that each resembles."""

    def __init__(self, heads: Members, links: Edges, earlier: int) -> None:
        self.heads = heads
        links = links[np.lexsort((links["one"], -links["similarity"], links["other"]))]
        self._starts = np.searchsorted(links["other"], np.arange(len(heads) + 1)).tolist()
        self._before, self._similarity = links["one"].tolist(), links["similarity"].tolist()
        roots = heads["root"]
        self.begins = np.append(True, roots[1:] != roots[:-1]).tolist()
        """Whether each text begins a group."""
        self.always = ((heads["row"] < earlier) | self.begins).tolist()
        """Whether each text is kept in any case."""
        self.leader = [-1] * len(heads)
        """The kept text that each resembles, its own number if it is kept, -1 if not decided."""
        self.similarity = [1.0] * len(heads)

    def partner(self, text: int) -> tuple[int, float] | None:
        """The most similar of the kept texts to which a text is linked, and their similarity."""
        for link in range(self._starts[text], self._starts[text + 1]):
            before = self._before[link]
            if self.leader[before] == before:
                return before, self._similarity[link]
        return None

    def decide(self, text: int, partner: tuple[int, float] | None) -> None:
        """Remove a text for its partner, or keep it."""
        self.leader[text], self.similarity[text] = partner or (text, 1.0)

    def undecided(self) -> Rows:
        """Decide the groups that links decide; returns the texts of all others."""
        undecided = list[int]()
        starts = [*np.flatnonzero(self.begins).tolist(), len(self.leader)]
        for start, end in pairwise(starts):
            clear = True
            for text in range(start, end):
                partner = None if self.always[text] else self.partner(text)
                self.decide(text, partner)
                clear &= partner is not None or self.always[text]
            if not clear:
                undecided += range(start, end)
                self.leader[start:end] = [-1] * (end - start)
        return np.array(undecided, dtype=np.int64)


def _compare(
    walk: _Walk, texts: Rows, signatures: Signatures, settings: DedupSettings, folder: Path
) -> tuple[int, int]:
    """Decide texts that links do not decide; returns `compared` and `incomplete` of a Choice."""
    if not len(texts):
        return 0, 0
    compared = incomplete = 0
    borders = np.flatnonzero(np.diff(np.cumsum(walk.begins)[texts])) + 1
    sizes = iter([int(np.median(walk.heads["size"][group])) for group in np.split(texts, borders)])
    with _Kept(folder, settings.threshold) as kept, Meter("dedup clusters", "texts", len(texts)) as meter:
        for batch, data in _batches(walk, texts, signatures, settings):
            for text in batch:
                if walk.begins[text]:
                    kept.start(next(sizes))
                partner = None if walk.always[text] else walk.partner(text)
                if partner is None:
                    own = shingles(text_of(data[text]), settings)
                    if not walk.always[text]:
                        compared += 1
                        partner, whole = kept.most_similar(own)
                        incomplete += partner is None and not whole
                    if partner is None:
                        kept.add(text, own)
                walk.decide(text, partner)
                meter.advance()
    return compared, incomplete


def _batches(
    walk: _Walk, texts: Rows, signatures: Signatures, settings: DedupSettings
) -> Iterator[tuple[list[int], dict[int, bytes]]]:
    """Batches of the texts in order, with the content of those that have no kept partner yet."""
    limit, end = settings.memory_bytes // _BYTES_PER_CHARACTER, 0
    while end < len(texts):
        start, wanted, characters = end, list[int](), 0
        while end < len(texts) and (characters < limit or not wanted):
            text = int(texts[end])
            if walk.partner(text) is None:
                wanted.append(text)
                characters += int(walk.heads["size"][text]) + 50  # Python's objects
            end += 1
        rows = walk.heads["row"][wanted]
        data = read_texts(np.sort(rows), signatures)
        yield texts[start:end].tolist(), {text: data[row] for text, row in zip(wanted, rows.tolist(), strict=True)}


class _Kept:
    """The shingles of the kept texts of a group, in a scratch file, and a bitmap of each in memory.

    Bit b of a bitmap says whether an odd number of shingles fall on b. If d shingles are in only
    one of two sets, their bitmaps differ in at most d bits. So the bitmaps bound the similarity
    from above, and no text that reaches the threshold is missed (Sandes et al. 2020, Bitmap filter:
    speeding up exact set similarity joins with bitwise operations).
    """

    def __init__(self, folder: Path, threshold: float) -> None:
        self._threshold = threshold
        self._file = scratch_file(folder)
        self._words = np.empty(_KEPT_BYTES // 8, dtype=np.uint64)  # takes memory as it is filled
        self._texts, self._sizes, self._offsets = np.empty((3, 8 * _KEPT_BYTES // _LEAST_BITS), dtype=np.int64)
        self._bits = self._count = self._end = 0

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def start(self, size: int) -> None:
        """Begin a group of texts of about `size` characters; forget those of the last group."""
        self._bits = min(_MOST_BITS, max(_LEAST_BITS, 1 << size.bit_length() + 1))
        self._maps = self._words.reshape(-1, self._bits // 64)
        self._count = self._end = 0
        self._file.seek(0)

    def add(self, text: int, own: Shingles) -> None:
        """Add a kept text; beyond the limit, it replaces the first."""
        slot = self._count % len(self._maps)
        self._maps[slot] = parities(own, self._bits)
        self._texts[slot], self._sizes[slot], self._offsets[slot] = text, len(own), self._end
        self._end += self._file.write(own.tobytes())
        self._count += 1

    def most_similar(self, own: Shingles) -> tuple[tuple[int, float] | None, bool]:
        """The most similar text at or above the threshold, if any; whether all were compared."""
        count = min(self._count, len(self._maps))
        both = self._sizes[:count] + len(own)
        common = np.minimum((both - self._distances(own, count)) // 2, np.minimum(self._sizes[:count], len(own)))
        bound = common / (both - common)
        possible = np.flatnonzero(bound >= self._threshold)
        whole = self._count == count and len(possible) <= _COMPARED
        if len(possible) > _COMPARED:
            possible = possible[np.lexsort((self._texts[possible], -bound[possible]))[:_COMPARED]]
        compared = [(jaccard(own, self._read(slot)), -int(self._texts[slot])) for slot in possible.tolist()]
        similarity, text = max(compared, default=(0.0, 0))
        return ((-text, similarity) if similarity >= self._threshold else None), whole

    def _distances(self, own: Shingles, count: int) -> NDArray[np.int64]:
        """The number of bits in which the bitmap of each kept text differs from that of a set."""
        bitmap = parities(own, self._bits)
        step = max(1, _BLOCK // len(bitmap))
        distances = np.empty(count, dtype=np.int64)
        for start in range(0, count, step):
            part = self._maps[start : min(count, start + step)]
            np.bitwise_count(part ^ bitmap).sum(axis=1, dtype=np.int64, out=distances[start : start + len(part)])
        return distances

    def _read(self, slot: int) -> Shingles:
        self._file.seek(int(self._offsets[slot]))
        data = self._file.read(8 * int(self._sizes[slot]))
        self._file.seek(self._end)
        return np.frombuffer(data, dtype=np.uint64)
