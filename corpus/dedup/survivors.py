"""Phase 4, in a group of linked documents: which are kept, and which kept one each of the others resembles.

The documents of a group are taken in order: those of earlier runs, then by `key`, the longest first. A document is
removed if a kept one of its group is at or above the threshold; otherwise it is kept. It names the most similar of the
kept ones with which phase 3 has compared it; if there is none, the most similar of all kept ones of the group. Only
then texts are read. Equal similarities go to the first in the order.

Two constants limit the work, in groups of tens of thousands of different texts: a document is compared with the last
`_KEPT_BYTES` of kept ones, which are the nearest in length, and with at most `_COMPARED` that may reach the threshold.
One that no comparison removes is kept.
"""

from collections.abc import Iterator
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

_KEPT_BYTES = 1 << 26  # bitmaps of kept texts: 65,536 of 4,000 characters, or 16 times as many of 250
_COMPARED = 64
_LEAST_BITS, _MOST_BITS = 1 << 9, 1 << 17  # of a bitmap: two to four per character
_BLOCK = 1 << 15  # words of bitmaps compared at a time: 256 KB fit the L2 cache of a core
_BYTES_PER_CHARACTER = 4  # of a text in memory, at most


class Choice(NamedTuple):
    """For each member the index of the kept one that it resembles (its own if it is kept) and their similarity."""

    survivor: Rows
    similarity: NDArray[np.float64]
    compared: int
    """Texts that were read and compared with kept ones."""
    incomplete: int
    """Those that were kept although a limit left some comparisons out."""


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
    walk = _Walk(members[heads], _linked(members, edges, text_of_member), signatures.earlier)
    compared, incomplete = _compare(walk, walk.undecided(), signatures, settings, folder)
    survivor = heads[np.array(walk.leader, dtype=np.int64)[text_of_member]]
    similarity = np.array(walk.similarity, dtype=np.float64)[text_of_member]
    survivor = np.where(new, survivor, np.arange(len(members)))  # of earlier ones both of two with the same text
    return Choice(survivor, similarity, compared, incomplete)


def _linked(members: Members, edges: Edges, text_of_member: Rows) -> tuple[Rows, Edges]:
    """The edges between texts, `one` before `other`, sorted by (other, falling similarity, one); where each's begin."""
    ends = np.searchsorted(members["row"], np.stack([edges["one"], edges["other"]]))
    links = edges.copy()
    links["one"], links["other"] = np.sort(text_of_member[ends], axis=0)
    links = links[np.lexsort((links["one"], -links["similarity"], links["other"]))]
    return np.searchsorted(links["other"], np.arange(len(members) + 1)), links


class _Walk:
    """Texts in the order in which they are decided, with the kept text that each resembles."""

    def __init__(self, heads: Members, linked: tuple[Rows, Edges], earlier: int) -> None:
        starts, links = linked
        self.heads, self._starts = heads, starts.tolist()
        self._before, self._similarity = links["one"].tolist(), links["similarity"].tolist()
        roots = heads["root"]
        self.begins = np.append(True, roots[1:] != roots[:-1]).tolist()  # a group
        self.always = ((heads["row"] < earlier) | self.begins).tolist()  # kept
        self.leader = [-1] * len(heads)
        """The kept text that each text resembles, its own number if it is kept, -1 if it is not decided."""
        self.similarity = [1.0] * len(heads)

    def partner(self, text: int) -> tuple[int, float] | None:
        """The most similar of the kept texts to which a text is linked."""
        for place in range(self._starts[text], self._starts[text + 1]):
            before = self._before[place]
            if self.leader[before] == before:
                return before, self._similarity[place]
        return None

    def decide(self, text: int, partner: tuple[int, float] | None) -> None:
        """Remove a text for its partner, or keep it."""
        self.leader[text], self.similarity[text] = partner or (text, 1.0)

    def undecided(self) -> Rows:
        """Decide the groups that links decide; returns the texts of all others."""
        start, unclear, found = 0, False, list[int]()
        for text in range(len(self.leader) + 1):
            if text == len(self.leader) or self.begins[text]:
                if unclear:
                    found += range(start, text)
                start, unclear = text, False
                if text == len(self.leader):
                    break
            partner = None if self.always[text] else self.partner(text)
            self.decide(text, partner)
            unclear |= partner is None and not self.always[text]
        for text in found:
            self.leader[text] = -1
        return np.array(found, dtype=np.int64)


def _compare(
    walk: _Walk, texts: Rows, signatures: Signatures, settings: DedupSettings, folder: Path
) -> tuple[int, int]:
    """Decide texts that links do not decide; returns how many were read, and how many limits left incomplete."""
    if not len(texts):
        return 0, 0
    compared = incomplete = 0
    group = np.cumsum(walk.begins)[texts]
    sizes = iter([int(np.median(walk.heads["size"][texts[low:high]])) for low, high in _spans(group)])
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


def _spans(values: Rows) -> Iterator[tuple[int, int]]:
    """Start and end of each run of equal values."""
    changes = np.flatnonzero(np.diff(values)) + 1
    return zip([0, *changes.tolist()], [*changes.tolist(), len(values)], strict=True)


def _batches(
    walk: _Walk, texts: Rows, signatures: Signatures, settings: DedupSettings
) -> Iterator[tuple[list[int], dict[int, bytes]]]:
    """The texts in order, some at a time, with the content of those for which no kept one is known yet."""
    limit, place = settings.memory_bytes // _BYTES_PER_CHARACTER, 0
    while place < len(texts):
        start, wanted, characters = place, list[int](), 0
        while place < len(texts) and (characters < limit or not wanted):
            text = int(texts[place])
            if walk.partner(text) is None:
                wanted.append(text)
                characters += int(walk.heads["size"][text]) + 50  # Python's objects
            place += 1
        rows = walk.heads["row"][wanted]
        data = read_texts(np.sort(rows), signatures)
        yield texts[start:place].tolist(), {text: data[row] for text, row in zip(wanted, rows.tolist(), strict=True)}


class _Kept:
    """The shingles of the kept texts of a group, in a scratch file, and a bitmap of each in memory.

    Bit b of a bitmap says whether an odd number of shingles fall on b. Two sets of which d shingles are in one only
    differ in at most d bits, so the bitmaps bound their similarity from above: a text that reaches the threshold is
    never missed (Sandes et al. 2020, Bitmap filter: speeding up exact set similarity joins with bitwise operations).
    """

    def __init__(self, folder: Path, threshold: float) -> None:
        self._threshold = threshold
        self._file = scratch_file(folder)
        self._words = np.empty(_KEPT_BYTES // 8, dtype=np.uint64)  # memory is taken as it is used
        self._texts, self._sizes, self._offsets = np.empty((3, 8 * _KEPT_BYTES // _LEAST_BITS), dtype=np.int64)
        self._bits = self._count = self._end = 0

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def start(self, size: int) -> None:
        """Forget the texts of the last group; those of the next one have about `size` characters."""
        self._bits = min(_MOST_BITS, max(_LEAST_BITS, 1 << size.bit_length() + 1))
        self._maps = self._words.reshape(-1, self._bits // 64)
        self._count = self._end = 0
        self._file.seek(0)

    def add(self, text: int, own: Shingles) -> None:
        """Add a kept text; beyond the limit, it takes the place of the first."""
        place = self._count % len(self._maps)
        self._maps[place] = parities(own, self._bits)
        self._texts[place], self._sizes[place], self._offsets[place] = text, len(own), self._end
        self._end += self._file.write(own.tobytes())
        self._count += 1

    def most_similar(self, own: Shingles) -> tuple[tuple[int, float] | None, bool]:
        """The most similar kept text at or above the threshold, if any; whether every comparison was made."""
        count = min(self._count, len(self._maps))
        both = self._sizes[:count] + len(own)
        common = np.minimum((both - self._distances(own, count)) // 2, np.minimum(self._sizes[:count], len(own)))
        bound = common / (both - common)
        possible = np.flatnonzero(bound >= self._threshold)
        whole = self._count == count and len(possible) <= _COMPARED
        if len(possible) > _COMPARED:
            possible = possible[np.lexsort((self._texts[possible], -bound[possible]))[:_COMPARED]]
        found = [(jaccard(own, self._read(place)), -int(self._texts[place])) for place in possible.tolist()]
        similarity, text = max(found, default=(0.0, 0))
        return ((-text, similarity) if similarity >= self._threshold else None), whole

    def _distances(self, own: Shingles, count: int) -> NDArray[np.int64]:
        """The number of bits in which the bitmap of each of the kept texts differs from that of a set."""
        bitmap = parities(own, self._bits)
        step = max(1, _BLOCK // len(bitmap))
        found = np.empty(count, dtype=np.int64)
        for start in range(0, count, step):
            part = self._maps[start : min(count, start + step)]
            np.bitwise_count(part ^ bitmap).sum(axis=1, dtype=np.int64, out=found[start : start + len(part)])
        return found

    def _read(self, place: int) -> Shingles:
        self._file.seek(int(self._offsets[place]))
        data = self._file.read(8 * int(self._sizes[place]))
        self._file.seek(self._end)
        return np.frombuffer(data, dtype=np.uint64)
