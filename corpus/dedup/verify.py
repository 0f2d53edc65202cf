"""Phase 3, one job per block of pairs: keep the pairs whose true Jaccard similarity reaches the threshold.

Segments: `edges`, rows of two documents, (edges, 2) i64 flattened; `similarity`, one f8 per edge.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.progress import Meter
from common.settings import DedupSettings
from corpus.dedup.pairs import Pairs, read_pairs
from corpus.dedup.segments import write_segments
from corpus.dedup.shingles import Shingles, jaccard, shingles
from corpus.dedup.signatures import Signatures

_BYTES_PER_CHARACTER = 24  # a text, its shingles, and their sorted copy


def _chunks(pairs: Pairs, signatures: Signatures, limit: int) -> Iterator[Pairs]:
    """Split pairs into runs whose texts have at most `limit` characters together, or that are a single pair."""
    rows, index = np.unique(pairs, return_inverse=True)
    sizes = signatures.values("size", rows)[index.reshape(-1, 2)]
    start = total = 0
    for number, (first, second) in enumerate(sizes.tolist()):
        new = second + (first if number == start or pairs[number, 0] != pairs[number - 1, 0] else 0)
        if total + new > limit and number > start:
            yield pairs[start:number]
            start, total, new = number, 0, first + second
        total += new
    if start < len(pairs):
        yield pairs[start:]


def similarities(pairs: Pairs, signatures: Signatures, settings: DedupSettings) -> NDArray[np.float64]:
    """The true Jaccard similarity of each pair, shape (pairs,)."""
    rows = np.unique(pairs)
    sets: dict[int, Shingles] = {
        row: shingles(text.decode(), settings)
        for row, text in zip(rows.tolist(), signatures.blobs("texts", rows), strict=True)
    }
    return np.array([jaccard(sets[first], sets[second]) for first, second in pairs.tolist()])


def write_edges(
    signatures: Signatures, pair_files: Sequence[Path], output: Path, settings: DedupSettings, block: int
) -> tuple[int, int]:
    """Verify the candidates of a block; returns how many there were, and how many reach the threshold."""
    pairs = read_pairs(pair_files, signatures, "near", block)
    edges = 0
    limit = settings.memory_bytes // _BYTES_PER_CHARACTER
    with (
        write_segments(output, {"candidates": len(pairs), "signatures": signatures.digest}) as file,
        Meter("dedup verify", "pairs", len(pairs)) as meter,
    ):
        for chunk in _chunks(pairs, signatures, limit):
            similarity = similarities(chunk, signatures, settings)
            duplicate = similarity >= settings.threshold
            file.append("edges", chunk[duplicate].ravel())
            file.append("similarity", similarity[duplicate])
            edges += int(duplicate.sum())
            meter.advance(len(chunk))
    return len(pairs), edges
