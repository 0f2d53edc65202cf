"""Phase 4, one job, joins documents into clusters and chooses survivors; phase 5, one job per shard, writes them.

The longest document survives, ties go to the smallest id. The segments of shard NAME are JSON, in bytes: its removed
documents as [[index in the shard, id of the survivor, whether its normalised text is equal], …].
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from common.console import warn
from common.errors import InputError
from common.files import BadLines, document_writer, read_documents, shard_stem
from common.settings import DedupSettings
from common.stats import Stats
from corpus.dedup.pairs import Pairs, part_of, read_pairs
from corpus.dedup.segments import Segments, SegmentWriter, write_segments
from corpus.dedup.shingles import jaccard, shingles
from corpus.dedup.signatures import Signatures
from corpus.runner import Drop, Step

_CHUNK = 1 << 16  # edges joined, or rows read, at a time
_GIANT = 1000  # documents: a larger cluster is more likely a chain than one text
_SAMPLE = 50  # members of the largest cluster whose similarities are computed
_BYTES_PER_MEMBER = 300  # row, root, survivor, size, key, their sort orders, and one id per cluster
_MANY = 10_000  # a corpus of this size without any duplicate is most likely a mistake

Rows = NDArray[np.int64]


class Forest:
    """Vectorised union-find over rows; the parents are in a temporary file, 8 bytes per document."""

    def __init__(self, count: int, folder: Path) -> None:
        with TemporaryFile(dir=folder) as file:
            file.truncate(max(8, 8 * count))
            self._parent: Rows = np.memmap(file, dtype=np.int64, mode="r+", shape=(max(1, count),))
        for start in range(0, count, _CHUNK):
            self._parent[start : start + _CHUNK] = np.arange(start, min(start + _CHUNK, count))

    def roots(self, rows: Rows) -> Rows:
        """The root of each row's tree, which is its smallest row; compresses the paths."""
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
            nodes, index = np.unique(ends, return_inverse=True)
            one, other = index.reshape(-1, 2).T
            graph = coo_array((np.ones(len(one), dtype=np.int8), (one, other)), shape=(len(nodes), len(nodes)))
            count, label = connected_components(graph, directed=False)
            smallest = np.full(count, np.iinfo(np.int64).max)
            np.minimum.at(smallest, label, nodes)
            self._parent[nodes] = smallest[label]


def _survivors(members: Rows, root: Rows, signatures: Signatures) -> Rows:
    """The survivor of each member's cluster: the longest document, ties to the smallest id, then the smallest key."""
    size, key = signatures.values("size", members), signatures.values("key", members)
    longest = np.zeros(len(members), dtype=np.int64)
    _, cluster = np.unique(root, return_inverse=True)
    np.maximum.at(longest, cluster, size)
    tied = np.flatnonzero(size == longest[cluster])
    ids = signatures.blobs("ids", members[tied])
    best: dict[int, tuple[bytes, int, int]] = {}
    for index, name in zip(tied.tolist(), ids, strict=True):
        candidate = (name, int(key[index]), int(members[index]))
        best[cluster[index]] = min(candidate, best.get(cluster[index], candidate))
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
    """Choose the survivors; returns figures for the statistics. Warns of giant clusters and of no duplicates at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    forest, joined = Forest(signatures.count, output.parent), np.zeros(signatures.count, dtype=np.bool_)
    edges = 0
    for found in _edges(signatures, pair_files, edge_files):
        forest.join(found)
        joined[found.ravel()] = True
        edges += len(found)
    sizes: Counter[int] = Counter()
    passes = 1 + int(joined.sum()) * _BYTES_PER_MEMBER // settings.memory_bytes
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
        warn(f"not one duplicate among {signatures.count} documents; check that the shards are the right ones")
    return figures


def _members(forest: Forest, joined: NDArray[np.bool_], number: int, passes: int) -> tuple[Rows, Rows]:
    """Rows and roots of the documents that have duplicates, in ascending order, for one part of the clusters."""
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


def _write_removed(file: SegmentWriter, removed: Rows, survivor: Rows, signatures: Signatures) -> None:
    chosen, index = np.unique(survivor, return_inverse=True)
    exact = signatures.values("exact", removed) == signatures.values("exact", chosen)[index]
    ids = [name.decode() for name in signatures.blobs("ids", chosen)]
    for start, shard in zip(signatures.starts.tolist(), signatures.shards, strict=False):
        low, high = np.searchsorted(removed, [start, start + shard.info["documents"]])
        if high > low:
            names = [ids[number] for number in index[low:high].tolist()]
            rows = zip((removed[low:high] - start).tolist(), names, exact[low:high].tolist(), strict=True)
            file.append(shard.path.stem, np.frombuffer(orjson.dumps(list(rows)), dtype=np.uint8))


def _describe(rows: Rows, signatures: Signatures, settings: DedupSettings) -> dict[str, Any]:
    """Size of the largest cluster, and the lowest similarity between some of its members. Warns of a giant."""
    order = np.argsort(signatures.values("key", rows), kind="stable")  # the same members whatever the shards
    sample = np.sort(rows[order[:_SAMPLE]])
    sets = [shingles(text.decode(), settings) for text in signatures.blobs("texts", sample)]
    lowest = min(jaccard(one, other) for number, one in enumerate(sets) for other in sets[:number])
    ids = sorted(name.decode() for name in signatures.blobs("ids", sample))[:3]
    if len(rows) >= _GIANT:
        warn(
            f"a cluster of {len(rows)} documents, {', '.join(ids)} among them; the lowest similarity seen inside is "
            f"{lowest:.2f}: if it is a chain of different texts, raise dedup.threshold"
        )
    return {"documents": len(rows), "lowest_similarity": round(lowest, 4), "ids": ids}


# ---------------------------------------------------------------------------------------------- phase 5: filter


def filter_shard(shard: Path, clusters: Path, output_dir: Path) -> Stats:
    """Write the survivors of a shard, and under `removed` the others, in order.

    One process: sending a document to another takes longer than filtering it. Raises InputError when the shard has
    changed since its signatures were made.
    """
    removals = _removals(shard, clusters)
    survivors, removed = outputs_of(shard, output_dir)
    step = Step("dedup", [shard], removed, max_bad_share=None, allow_empty=True)
    with step.results(document_writer(survivors)) as results:
        # phase 1 has reported the bad lines
        for index, document in enumerate(step.stats.counted(read_documents(shard, BadLines(1.0)))):
            if (removal := removals.pop(index, None)) is None:
                results.record(document)
            else:
                survivor, reason = removal
                results.record(Drop({**document, "survivor": survivor}, reason))
        if removals:
            raise InputError(f"{shard}: shorter than its signatures; run the phase `signatures` again")
    return step.stats


def _removals(shard: Path, clusters: Path) -> dict[int, tuple[str, str]]:
    """The removed documents of a shard by their index: the survivor's id, and the reason."""
    with Segments(clusters) as file:
        rows = [row for part in file.each(shard_stem(shard)) for row in orjson.loads(part.tobytes())]
    return {index: (survivor, "exact" if same else "near") for index, survivor, same in rows}


def outputs_of(shard: Path, output_dir: Path) -> tuple[Path, Path]:
    """The files for the survivors of a shard and for its removed documents."""
    name = f"{shard_stem(shard)}.jsonl.zst"
    return output_dir / name, output_dir / "removed" / name
