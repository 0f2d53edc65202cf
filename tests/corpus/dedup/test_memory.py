import tracemalloc
from pathlib import Path

import numpy as np

from common.settings import DedupSettings
from corpus.dedup.clusters import write_clusters
from corpus.dedup.columns import write_columns
from corpus.dedup.pairs import write_pairs
from corpus.dedup.signatures import CHUNK, Signatures, fingerprint, key_of
from corpus.segments import write_segments

NAME = "0123456789abcdef"
LINE = b'{"id":"%s","text":""}' % NAME.encode()
SETTINGS = DedupSettings(bands=2, memory_gb=0.004)  # 4 MB for what grows with the corpus


def synthetic(folder: Path, count: int, settings: DedupSettings = SETTINGS) -> list[Path]:
    """Signatures of `count` documents in shards of 20,000, one in ten a duplicate of its neighbour
    in every band.
    """
    (folder / "shard.jsonl").write_bytes(LINE)
    rng = np.random.default_rng(1)
    paths: list[Path] = []
    for start in range(0, count, 20_000):
        paths.append(folder / f"{start // 20_000:04d}.signatures")
        rows = min(20_000, count - start)
        assert rows <= CHUNK
        with write_segments(
            paths[-1], {"settings": fingerprint(settings), "shard": "shard.jsonl", "documents": rows}
        ) as file:
            twin = np.arange(rows) - (np.arange(rows) % 10 == 1)
            hashes = rng.integers(0, 1 << 64, (rows, 1 + settings.bands), dtype=np.uint64)
            hashes[:, 1:] = hashes[twin, 1:]
            keys = np.array([key_of(NAME, "")] * rows, dtype=np.uint64)
            write_columns(file, hashes, hashes[:, 0], keys)
            file.append("key", keys)
            file.append("exact", hashes[:, 0].copy())
            file.append("size", rng.integers(600, 6000, rows))
            file.append("lines", np.tile([0, len(LINE)], rows))
            file.append("ids", np.frombuffer(NAME.encode() * rows, dtype=np.uint8))
            file.append("ids_end", np.arange(1, rows + 1) * 16)
    return paths


def peaks(folder: Path, count: int) -> list[int]:
    """Bytes of memory at most while `count` documents are paired, and while they are joined into
    clusters.
    """
    folder.mkdir()
    signatures, found = Signatures(synthetic(folder, count), SETTINGS), list[int]()
    pairs, edges = folder / "0.pairs", folder / "0.edges"
    with write_segments(edges, {"candidates": 0, "signatures": signatures.digest}) as file:
        for start in range(0, count, 20_000):
            first = np.arange(start, start + 20_000, 10)
            file.append("edges", np.stack([first, first + 1], axis=1).ravel())
            file.append("similarity", np.ones(len(first)))

    def bands() -> None:
        assert write_pairs(signatures, pairs, SETTINGS, 0, 1) == count // 10 * SETTINGS.bands

    def clusters() -> None:
        figures = write_clusters(signatures, [pairs], [edges], folder / "all.clusters", SETTINGS)
        assert figures["cluster_sizes"] == {"1": count // 10 * 8, "2": count // 10}

    for work in (bands, clusters):
        tracemalloc.start()
        try:
            work()
            found.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return found


def test_three_times_the_documents_take_no_more_memory(tmp_path: Path) -> None:
    _, *both = [peaks(tmp_path / str(count), count) for count in (20_000, 80_000, 240_000)]  # the first imports
    for small, large in zip(*both, strict=True):
        # clusters know a byte of each document; without parts 240,000 would take 48 MB in bands
        assert large < 1.3 * small + 240_000
