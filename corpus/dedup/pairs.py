"""Phase 2 pairs documents that may be duplicates; phase 3 keeps the pairs that are.

A column of hashes is read once, in parts of its range that fit in memory. In a group of equal
hashes, each document is paired with the first and with the previous one: O(n) pairs for a group of
any size. Groups are ordered by `key`, so pairs do not depend on shards, and the first document is
the longest, which is the likeliest to be kept. Earlier documents (`dedup.against`) come first and
are not paired with each other.

| file of | segments | content |
|---|---|---|
| phase 2, per part | exactB, nearB | i64 (pairs, 2): those whose first row is in block B |
| phase 3, per block | edges | i64 (edges, 2): the pairs that reach the threshold |
| | similarity | f8 (edges,): their true Jaccard similarity |
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.progress import Meter
from common.settings import DedupSettings
from corpus.dedup.shingles import Normalised, jaccard, normalised, shingles
from corpus.dedup.signatures import Signatures
from corpus.segments import Segments, write_segments

Rows = NDArray[np.int64]
"""Documents by their index in all shards."""
Pairs = NDArray[np.int64]
"""Rows of two documents, shape (pairs, 2), the smaller row first."""

_BYTES_PER_ROW = 200  # while a part is paired: 4 columns of 8 bytes, their sorted copies, the pairs
_BYTES_PER_TEXT = 200  # Python's objects for a text, beside its bytes
_PIECE = 1 << 20  # pairs whose lines are located at a time


def pairs_in_groups(group: NDArray[np.uint64], rows: Rows) -> Pairs:
    """Pair each row with the first and the previous one of its group; `group` is sorted."""
    index = np.arange(len(group))
    new = np.ones(len(group), dtype=np.bool_)
    new[1:] = np.diff(group) != 0
    first = np.maximum.accumulate(np.where(new, index, 0))
    later, third = index > first, index > first + 1
    one = np.concatenate([rows[first[later]], rows[index[third] - 1]])
    other = np.concatenate([rows[later], rows[third]])
    return np.sort(np.stack([one, other], axis=1), axis=1)


def exact_pairs(rows: Rows, hashes: NDArray[np.uint64], key: NDArray[np.uint64], earlier: int = 0) -> Pairs:
    """Pair documents with equal normalised text; rows below `earlier` come first."""
    order = np.lexsort((rows, key, rows >= earlier, hashes))
    return pairs_in_groups(hashes[order], rows[order])


def near_pairs(
    rows: Rows, hashes: NDArray[np.uint64], exact: NDArray[np.uint64], key: NDArray[np.uint64], earlier: int = 0
) -> Pairs:
    """Pair documents that agree in a band; one represents all with the same normalised text."""
    order = np.lexsort((rows, key, rows >= earlier, exact, hashes))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (np.diff(hashes[order]) != 0) | (np.diff(exact[order]) != 0)
    order = order[first]
    order = order[np.lexsort((exact[order], key[order], rows[order] >= earlier, hashes[order]))]
    return pairs_in_groups(hashes[order], rows[order])


def part_of(rows: Rows, parts: int) -> NDArray[np.int64]:
    """The part of each row when rows are hashed into `parts`."""
    # multiplicative hashing: Knuth, TAOCP 3, 6.4
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)


def write_pairs(signatures: Signatures, output: Path, settings: DedupSettings, part: int, parts: int) -> int:
    """Pair the documents that agree in a column of this part; returns the number of pairs."""
    columns = [(column, number) for number in range(settings.ranges) for column in range(1 + settings.bands)]
    passes = 1 + signatures.count * _BYTES_PER_ROW // (settings.memory_bytes * settings.ranges)
    info = {"jobs": parts, "ranges": settings.ranges, "signatures": signatures.digest}
    total = 0
    with write_segments(output, info) as file, Meter("dedup bands", "columns") as meter:
        for column, number in columns[part::parts]:
            for range_part in range(number * passes, (number + 1) * passes):
                rows, hashes, exact, key = signatures.part(column, range_part, passes * settings.ranges)
                if column:
                    pairs = near_pairs(rows, hashes, exact, key, signatures.earlier)
                else:
                    pairs = exact_pairs(rows, hashes, key, signatures.earlier)
                pairs = pairs[pairs[:, 1] >= signatures.earlier]  # the larger row
                block = pairs[:, 0] * parts // max(1, signatures.count)  # neighbours share a block
                pairs = pairs[np.argsort(block, kind="stable")]
                ends = np.cumsum(np.bincount(block, minlength=parts))
                for index, chunk in enumerate(np.split(pairs, ends[:-1])):
                    file.append(f"{'near' if column else 'exact'}{index}", chunk.ravel())
                total += len(pairs)
            meter.advance()
    return total


def read_pairs(paths: Sequence[Path], signatures: Signatures, kind: str, block: int) -> Pairs:
    """The distinct pairs of a kind (`exact`, `near`) and block in all files, in order.

    Raises InputError for a file that is missing, damaged, or from another run.
    """
    pairs: list[Pairs] = [np.empty((0, 2), dtype=np.int64)]
    for path in paths:
        with Segments(path) as file:
            signatures.check(file)
            pairs.extend(values.reshape(-1, 2) for values in file.each(f"{kind}{block}"))
    return np.unique(np.concatenate(pairs), axis=0)


# ---------------------------------------------------------------- phase 3: verify


def chunks(pairs: Pairs, signatures: Signatures, limit: int) -> Iterator[Pairs]:
    """Split pairs into runs whose texts total at most `limit` bytes, or single pairs."""
    for piece in np.split(pairs, range(_PIECE, len(pairs), _PIECE)):
        rows, index = np.unique(piece, return_inverse=True)
        sizes = (signatures.lines(rows)[:, 1] + _BYTES_PER_TEXT)[index.reshape(-1, 2)]
        start = total = 0
        for number, (first, second) in enumerate(sizes.tolist()):
            new = second + (first if number == start or piece[number, 0] != piece[number - 1, 0] else 0)
            if total + new > limit and number > start:
                yield piece[start:number]
                start, total, new = number, 0, first + second
            total += new
        if start < len(piece):
            yield piece[start:]


def similarities(pairs: Pairs, signatures: Signatures, settings: DedupSettings) -> NDArray[np.float64]:
    """The true Jaccard similarity of each pair, shape (pairs,)."""
    # texts are held, not their shingles, which take 24 times as much: hashing a text again costs
    # less than reading its frame again
    texts = read_texts(np.unique(pairs), signatures)
    result, last, one = np.empty(len(pairs)), -1, shingles(normalised(""), settings)
    for index, (first, second) in enumerate(pairs.tolist()):
        if first != last:
            last, one = first, shingles(text_of(texts[first]), settings)
        result[index] = jaccard(one, shingles(text_of(texts[second]), settings))
    return result


def read_texts(rows: Rows, signatures: Signatures) -> dict[int, bytes]:
    """The normalised texts of some rows in ascending order, in UTF-8."""
    documents = zip(rows.tolist(), signatures.documents(rows), strict=True)
    return {row: normalised(document["text"]).encode() for row, document in documents}


def text_of(data: bytes) -> Normalised:
    """A text of `read_texts`."""
    return Normalised(data.decode())


def write_edges(
    signatures: Signatures, pair_files: Sequence[Path], output: Path, settings: DedupSettings, block: int
) -> tuple[int, int]:
    """Verify the candidates of a block; returns the numbers of candidates and of edges."""
    pairs = read_pairs(pair_files, signatures, "near", block)
    info = {"jobs": len(pair_files), "threshold": settings.threshold, "signatures": signatures.digest}
    edges = 0
    with (
        write_segments(output, info | {"candidates": len(pairs)}) as file,
        Meter("dedup verify", "pairs", len(pairs)) as meter,
    ):
        for chunk in chunks(pairs, signatures, settings.memory_bytes):
            similarity = similarities(chunk, signatures, settings)
            duplicate = similarity >= settings.threshold
            file.append("edges", chunk[duplicate].ravel())
            file.append("similarity", similarity[duplicate])
            edges += int(duplicate.sum())
            meter.advance(len(chunk))
    return len(pairs), edges
