import tracemalloc
from pathlib import Path

import numpy as np
import zstandard

from common.settings import DedupSettings
from corpus.dedup.clusters import write_clusters
from corpus.dedup.pairs import write_pairs
from corpus.dedup.segments import write_segments
from corpus.dedup.signatures import Signatures, fingerprint

SETTINGS = DedupSettings(bands=2, memory_gb=0.004)  # 4 MB for what grows with the corpus
ROWS = 20_000  # of a shard


def synthetic(folder: Path, shards: int) -> list[Path]:
    """Signatures of documents without texts, one in ten a duplicate of its neighbour in every band."""
    rng, paths = np.random.default_rng(1), [folder / f"{number:04d}.signatures" for number in range(shards)]
    twin = np.arange(ROWS) - (np.arange(ROWS) % 10 == 1)
    for path in paths:
        with write_segments(path, {"settings": fingerprint(SETTINGS), "documents": ROWS, "bad_lines": 0}) as file:
            for name in ("key", "exact", "band0", "band1"):
                values = rng.integers(0, 1 << 63, ROWS, dtype=np.uint64) * np.uint64(2)
                file.append(name, values if name in ("key", "exact") else values[twin])
            file.append("size", rng.integers(600, 6000, ROWS))
            for name, blob in (("texts", zstandard.compress(b"some text")), ("ids", b"0123456789abcdef")):
                file.append(name, np.frombuffer(blob * ROWS, dtype=np.uint8))
                file.append(f"{name}_end", np.arange(1, ROWS + 1) * len(blob))
    return paths


def peaks(folder: Path, shards: int) -> tuple[int, int]:
    """The most memory that the phases `bands` and `clusters` take."""
    folder.mkdir()
    found, files = [], [folder / name for name in ("0.pairs", "0.edges", "all.clusters")]
    with Signatures(synthetic(folder, shards), SETTINGS) as signatures:
        with write_segments(files[1], {"candidates": 0, "signatures": signatures.digest}) as file:
            first = np.arange(0, signatures.count, 10)
            file.append("edges", np.stack([first, first + 1], axis=1).ravel())
        tracemalloc.start()
        try:
            assert write_pairs(signatures, files[0], SETTINGS, 0, 1) == signatures.count // 10 * SETTINGS.bands
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
            figures = write_clusters(signatures, files[:1], files[1:2], files[2], SETTINGS)
            found.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert figures["cluster_sizes"] == {"1": signatures.count // 10 * 8, "2": signatures.count // 10}
    return found[0], found[1]


def test_many_times_the_documents_take_no_more_memory(tmp_path: Path) -> None:
    _, small, large = (peaks(tmp_path / str(shards), shards) for shards in (1, 3, 8))  # the first imports libraries
    for few, many in zip(small, large, strict=True):
        # clusters know a byte of each document; without parts 160,000 would take 32 MB in bands
        assert many < 1.3 * few + 160_000
