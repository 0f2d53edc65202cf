"""Phase 4, one job: clusters of documents joined by edges, and the one that survives of each.

The longest document survives, ties go to the smallest id. Segments, for each shard NAME: `NAME/removed` (i64: places in
the shard), `NAME/exact` (u8: 1 where the survivor's normalised text is equal), `NAME/ids` and `NAME/ids_length` (the
survivors' ids, bytes and i64).
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.console import warn
from common.settings import DedupSettings
from corpus.dedup.pairs import Pairs, part_of, read_pairs
from corpus.dedup.segments import Segments, write_segments
from corpus.dedup.shingles import jaccard, shingles
from corpus.dedup.signatures import Signatures

_CHUNK = 1 << 16  # edges joined, or rows looked at, at a time
_GIANT = 1000  # documents: a larger cluster is more likely a chain than one text
_LOOKED_AT = 50  # members of the largest cluster whose similarities are computed
_BYTES_A_MEMBER = 300  # row, root, survivor, size and key, what they are sorted by, and an id a cluster
_MANY = 10_000  # a corpus of this size without one duplicate is more likely a mistake than a miracle

Rows = NDArray[np.int64]


class Forest:
    """Union-find over rows, vectorised: the parents are in a temporary file, 8 bytes a document."""

    def __init__(self, count: int, folder: Path) -> None:
        with TemporaryFile(dir=folder) as file:
            file.truncate(max(8, 8 * count))
            self._parent: Rows = np.memmap(file, dtype=np.int64, mode="r+", shape=(max(1, count),))
        for start in range(0, count, _CHUNK):
            self._parent[start : start + _CHUNK] = np.arange(start, min(start + _CHUNK, count))

    def roots(self, rows: Rows) -> Rows:
        """The root of each row's tree, which is its smallest row; paths to it are shortened."""
        root = self._parent[rows]
        while not np.array_equal(above := self._parent[root], root):
            root = above
        self._parent[rows] = root
        return np.asarray(root)

    def join(self, edges: Pairs) -> None:
        """Join the trees of the two rows of each edge."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        for start in range(0, len(edges), _CHUNK):
            ends = self.roots(edges[start : start + _CHUNK].ravel()).reshape(-1, 2)
            nodes, place = np.unique(ends, return_inverse=True)
            one, other = place.reshape(-1, 2).T
            graph = coo_array((np.ones(len(one), dtype=np.int8), (one, other)), shape=(len(nodes), len(nodes)))
            count, label = connected_components(graph, directed=False)
            smallest = np.full(count, np.iinfo(np.int64).max)
            np.minimum.at(smallest, label, nodes)
            self._parent[nodes] = smallest[label]


def _survivors(members: Rows, root: Rows, signatures: Signatures) -> Rows:
    """The survivor of each member's cluster: the longest document, ties to the smallest id, then to the key."""
    size, key = signatures.values("size", members), signatures.values("key", members)
    longest = np.zeros(len(members), dtype=np.int64)
    _, cluster = np.unique(root, return_inverse=True)
    np.maximum.at(longest, cluster, size)
    tied = np.flatnonzero(size == longest[cluster])
    ids = signatures.blobs("ids", members[tied])
    best: dict[int, tuple[bytes, int, int]] = {}
    for place, name in zip(tied.tolist(), ids, strict=True):
        candidate = (name, int(key[place]), int(members[place]))
        best[cluster[place]] = min(candidate, best.get(cluster[place], candidate))
    survivor = np.array([best[number][2] for number in range(len(best))], dtype=np.int64)
    return survivor[cluster]


def _edges(signatures: Signatures, pair_files: Sequence[Path], edge_files: Sequence[Path]) -> Iterator[Pairs]:
    for block in range(len(pair_files)):
        yield read_pairs(pair_files, signatures, "exact", block)
    for path in edge_files:
        with Segments(path) as file:
            signatures.check(file)
            yield from (values.reshape(-1, 2) for values in file.each("edges"))


def write_clusters(
    signatures: Signatures,
    pair_files: Sequence[Path],
    edge_files: Sequence[Path],
    output: Path,
    settings: DedupSettings,
) -> dict[str, Any]:
    """Choose the survivors; figures for the statistics. Warns of giant clusters and of a corpus without duplicates."""
    output.parent.mkdir(parents=True, exist_ok=True)
    forest, joined = Forest(signatures.count, output.parent), np.zeros(signatures.count, dtype=np.bool_)
    edges = 0
    for found in _edges(signatures, pair_files, edge_files):
        forest.join(found)
        joined[found.ravel()] = True
        edges += len(found)
    sizes: Counter[int] = Counter()
    passes = 1 + int(joined.sum()) * _BYTES_A_MEMBER // settings.memory_bytes
    largest = np.empty(0, dtype=np.int64)
    with write_segments(output, {"documents": signatures.count}) as file:
        for number in range(passes):
            members, root = _members(forest, joined, number, passes)
            survivor = _survivors(members, root, signatures)
            gone = survivor != members
            assert not np.isin(survivor, members[gone]).any(), "a survivor is never removed"
            _, first, count = np.unique(root, return_index=True, return_counts=True)
            assert gone.sum() == count.sum() - len(count), "every cluster has exactly one survivor"
            _write_removed(file, members[gone], survivor[gone], signatures)
            sizes.update(count.tolist())
            if len(count) and count.max() > len(largest):
                largest = members[root == root[first[np.argmax(count)]]]
    sizes[1] += signatures.count - int(joined.sum())
    figures = {
        "documents": signatures.count,
        "candidate_pairs": sum(_candidates(path) for path in edge_files),
        "edges": edges,
        "cluster_sizes": {str(size): sizes[size] for size in sorted(sizes) if sizes[size]},
    }
    if len(largest):
        figures["largest_cluster"] = _describe(largest, signatures, settings)
    elif signatures.count > _MANY:
        warn(f"not one duplicate among {signatures.count} documents; is that right?")
    return figures


def _members(forest: Forest, joined: NDArray[np.bool_], number: int, passes: int) -> tuple[Rows, Rows]:
    """The documents that have duplicates, in ascending order, and their roots: those of one part of the clusters."""
    found: list[tuple[Rows, Rows]] = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    for start in range(0, len(joined), _CHUNK):
        rows = start + np.flatnonzero(joined[start : start + _CHUNK])
        root = forest.roots(rows)
        mine = part_of(root, passes) == number
        found.append((rows[mine], root[mine]))
    members, roots = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return members, roots


def _candidates(path: Path) -> int:
    with Segments(path) as file:
        return int(file.info["candidates"])


def _write_removed(file: Any, removed: Rows, survivor: Rows, signatures: Signatures) -> None:
    exact = np.empty(len(removed), dtype=np.uint8)
    chosen, place = np.unique(survivor, return_inverse=True)
    exact[:] = signatures.values("exact", removed) == signatures.values("exact", chosen)[place]
    ids = list(signatures.blobs("ids", chosen))
    for start, shard in zip(signatures.starts.tolist(), signatures.shards, strict=False):
        low, high = np.searchsorted(removed, [start, start + shard.info["documents"]])
        names = [ids[number] for number in place[low:high].tolist()]
        file.append(f"{shard.path.stem}/removed", removed[low:high] - start)
        file.append(f"{shard.path.stem}/exact", exact[low:high])
        file.append(f"{shard.path.stem}/ids", np.frombuffer(b"".join(names), dtype=np.uint8))
        file.append(f"{shard.path.stem}/ids_length", np.array([len(name) for name in names], dtype=np.int64))


def _describe(rows: Rows, signatures: Signatures, settings: DedupSettings) -> dict[str, Any]:
    """The largest cluster: its size and, between some of its members, the lowest similarity. Warns of a giant."""
    order = np.argsort(signatures.values("key", rows), kind="stable")  # the same members whatever the shards
    looked = np.sort(rows[order[:_LOOKED_AT]])
    sets = [shingles(text.decode(), settings) for text in signatures.blobs("texts", looked)]
    lowest = min(jaccard(one, other) for number, one in enumerate(sets) for other in sets[:number])
    ids = sorted(name.decode() for name in signatures.blobs("ids", looked))[:3]
    if len(rows) >= _GIANT:
        print(
            f"warning: a cluster of {len(rows)} documents, {', '.join(ids)} among them; the lowest similarity seen "
            f"inside is {lowest:.2f}: if it is a chain of different texts, raise dedup.threshold",
            file=sys.stderr,
        )
    return {"documents": len(rows), "lowest_similarity": round(lowest, 4), "ids": ids}
