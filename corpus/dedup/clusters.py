"""Phase 4, one job, joins documents into clusters and chooses survivors; phase 5, one job per shard, filters shards.

The longest document survives, ties go to the smallest id; in a cluster with earlier documents (`dedup.against`), only
these survive. The segments of shard NAME are JSON, in bytes: its removed documents as
[[index in the shard, id of the survivor, whether its normalised text is equal], …].
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from common.console import warn
from common.errors import InputError
from common.files import BadLines, document_writer, naming, read_documents, scratch_file, shard_stem
from common.settings import DedupSettings
from common.stats import Stats
from corpus.dedup.pairs import Pairs, chunks, part_of, read_pairs, similarities
from corpus.dedup.segments import Segments, SegmentWriter, write_segments
from corpus.dedup.shingles import jaccard, shingles
from corpus.dedup.signatures import Signatures
from corpus.runner import Drop, ShardStep

_CHUNK = 1 << 16  # edges joined, or rows read, at a time
_COMPARED = 1 << 16  # near duplicates compared with their survivors, at most: 6 s for documents of 620 characters
_SAMPLE = 50  # members of the largest cluster whose similarities are computed
_NEAR, _BEFORE, _SHOWN = 10, 100, 600  # near duplicates in the statistics; characters before they differ, and in all
_BYTES_PER_MEMBER = 300  # a _MEMBER, its id, survivor, sort orders
_PASSES = 256  # at most: each has two open files

Rows = NDArray[np.int64]
Members = NDArray[np.void]
"""Documents that have duplicates, in ascending order of their rows; their dtype is _MEMBER."""

_MEMBER = np.dtype(
    [("root", "<i8"), ("row", "<i8"), ("size", "<i8"), ("key", "<u8"), ("exact", "<u8"), ("id_bytes", "<i8")]
)


def write_clusters(
    signatures: Signatures,
    pair_files: Sequence[Path],
    edge_files: Sequence[Path],
    output: Path,
    settings: DedupSettings,
) -> dict[str, Any]:
    """Choose the survivors; returns figures for the statistics. Warns of chains."""
    output.parent.mkdir(parents=True, exist_ok=True)
    forest = Forest(signatures.count, output.parent)
    clustered, n_edges = _zeros(signatures.count, np.bool_, output.parent), 0
    for edges in _edges(signatures, pair_files, edge_files):
        forest.join(edges)
        clustered[edges.ravel()] = True
        n_edges += len(edges)
    passes = min(_PASSES, 1 + int(clustered.sum()) * _BYTES_PER_MEMBER // settings.memory_bytes)
    compared = min(_COMPARED, settings.memory_bytes >> 10)  # 250 bytes each
    sizes, largest, near = Counter[int](), np.empty(0, dtype=_MEMBER), np.empty((0, 4), dtype=np.uint64)
    with write_segments(output, {"documents": signatures.count - signatures.earlier}) as file:
        for members, ids in _clusters(signatures, forest, clustered, passes, output.parent):
            survivor = _survivors(members, ids, signatures.earlier)
            removed = (survivor != np.arange(len(members))) & (members["row"] >= signatures.earlier)
            assert not removed[survivor].any(), "a survivor is never removed"
            _write_removed(file, members, ids, np.flatnonzero(removed), survivor, signatures)
            _, cluster, size = np.unique(members["root"], return_inverse=True, return_counts=True)
            near = np.concatenate([near, _near(members, removed, survivor, size[cluster])])
            near = near[np.lexsort(near.T[::-1])[:compared]]
            sizes.update(size.tolist())
            if len(size) and size.max() > len(largest):
                largest = members[cluster == np.argmax(size)]
    sizes[1] += signatures.count - signatures.earlier - int(clustered[signatures.earlier :].sum())
    figures = {
        "documents": signatures.count - signatures.earlier,
        "candidate_pairs": sum(int(Segments(path).info["candidates"]) for path in edge_files),
        "edges": n_edges,
        "cluster_sizes": {str(size): sizes[size] for size in sorted(sizes) if sizes[size]},
        "near": _describe_near(near[:_NEAR, 1:3].tolist(), signatures, settings),
        "chains": _describe_chains(near, signatures, settings),
    }
    if len(largest):
        figures["largest_cluster"] = _describe_cluster(largest, signatures, settings)
    return figures


def _zeros(count: int, dtype: type, folder: Path) -> NDArray[Any]:
    """An array of zeros in an unnamed temporary file."""
    with scratch_file(folder) as file, naming(folder):
        # not truncate: a page that a full disk has no room for would end the process (SIGBUS)
        os.posix_fallocate(file.fileno(), 0, max(1, count) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(max(1, count),))


class Forest:
    """Vectorised union-find over rows; the parents are in a temporary file, 8 bytes per document."""

    def __init__(self, count: int, folder: Path) -> None:
        self._parent: Rows = _zeros(count, np.int64, folder)
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


def _edges(signatures: Signatures, pair_files: Sequence[Path], edge_files: Sequence[Path]) -> Iterator[Pairs]:
    for block in range(len(pair_files)):
        yield read_pairs(pair_files, signatures, "exact", block)
    for path in edge_files:
        with Segments(path) as file:
            signatures.check(file)
            yield from (values.reshape(-1, 2) for values in file.each("edges"))


def _clusters(
    signatures: Signatures, forest: Forest, clustered: NDArray[np.bool_], passes: int, folder: Path
) -> Iterator[tuple[Members, list[bytes]]]:
    """The `clustered` documents and their ids, in `passes` parts of whole clusters.

    Every column is read once: each part waits in a temporary file.
    """
    with ExitStack() as stack:
        files = [[stack.enter_context(scratch_file(folder)) for _ in range(2)] for _ in range(passes)]
        for first, count, shard, number in signatures.chunks():
            rows = np.flatnonzero(clustered[first : first + count])
            if not len(rows):
                continue
            members = np.empty(len(rows), dtype=_MEMBER)
            members["row"], members["root"] = first + rows, forest.roots(first + rows)
            for name in ("size", "key", "exact"):
                members[name] = shard.array(name, number)[rows]
            ends, ids = shard.array("ids_end", number), shard.array("ids", number).tobytes()
            starts = np.concatenate([[0], ends[:-1]])[rows]
            members["id_bytes"] = ends[rows] - starts
            part = part_of(members["root"], passes)
            for each in np.unique(part).tolist():
                own = part == each
                files[each][0].write(members[own].tobytes())
                spans = zip(starts[own].tolist(), members["id_bytes"][own].tolist(), strict=True)
                files[each][1].write(b"".join(ids[start : start + length] for start, length in spans))
        for pair in files:
            data, ids = (file.read() for file in pair if file.seek(0) == 0)
            members = np.frombuffer(data, dtype=_MEMBER)
            ends = np.cumsum(members["id_bytes"]).tolist()
            yield members, [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=False)]


def _survivors(members: Members, ids: Sequence[bytes], earlier: int) -> Rows:
    """The index of each member's survivor: the longest document of its cluster, ties to the smallest id, then key."""
    _, cluster = np.unique(members["root"], return_inverse=True)
    size = members["size"] + (members["row"] < earlier) * (1 << 62)  # earlier documents win
    longest = np.zeros(len(members), dtype=np.int64)
    np.maximum.at(longest, cluster, size)
    best: dict[int, tuple[bytes, int, int]] = {}
    for index in np.flatnonzero(size == longest[cluster]).tolist():
        candidate = (ids[index], int(members["key"][index]), index)
        best[cluster[index]] = min(candidate, best.get(cluster[index], candidate))
    survivor = np.array([best[number][2] for number in range(len(best))], dtype=np.int64)
    return survivor[cluster]


def _write_removed(
    file: SegmentWriter, members: Members, ids: Sequence[bytes], removed: Rows, survivor: Rows, signatures: Signatures
) -> None:
    survivor = survivor[removed]
    rows, exact = members["row"][removed], members["exact"][removed] == members["exact"][survivor]
    names = [ids[index].decode() for index in survivor.tolist()]
    starts = signatures.starts[-1 - len(signatures.own) :].tolist()
    for (start, end), shard in zip(pairwise(starts), signatures.own, strict=True):
        low, high = np.searchsorted(rows, [start, end])
        if high > low:
            of_shard = zip((rows[low:high] - start).tolist(), names[low:high], exact[low:high].tolist(), strict=True)
            file.append(shard.path.stem, np.frombuffer(orjson.dumps(list(of_shard)), dtype=np.uint8))


def _near(members: Members, removed: NDArray[np.bool_], survivor: Rows, size: Rows) -> NDArray[np.uint64]:
    """Key, row, row of the survivor and size of the cluster of each near duplicate, shape (near duplicates, 4)."""
    near = np.flatnonzero(removed & (members["exact"] != members["exact"][survivor]))
    columns = members["key"][near], members["row"][near], members["row"][survivor[near]], size[near]
    return np.stack([column.astype(np.uint64) for column in columns], axis=1)


def _describe_chains(near: NDArray[np.uint64], signatures: Signatures, settings: DedupSettings) -> dict[str, Any]:
    """Count the near duplicates less similar to their survivor than the threshold (chains), and warn of them."""
    pairs = near[near[:, 3] > 2, 1:3].astype(np.int64)  # a cluster of two is a verified pair
    parts = chunks(pairs[np.argsort(pairs[:, 1], kind="stable"), ::-1], signatures, settings.memory_bytes)
    similarity = np.concatenate([np.ones(1), *(similarities(part, signatures, settings) for part in parts)])
    count, lowest = int((similarity < settings.threshold).sum()), float(similarity.min())
    if count:
        warn(
            f"{count} of {len(near)} near duplicates compared are less similar to their survivor than "
            f"dedup.threshold, down to {lowest:.2f}: chains join different texts; raise dedup.threshold"
        )
    return {"compared": len(near), "below_threshold": count, "lowest_similarity": round(lowest, 4)}


def _describe_near(rows: Sequence[tuple[int, int]], signatures: Signatures, settings: DedupSettings) -> list[Any]:
    """Pairs of a near duplicate, with its similarity, and its survivor; texts start shortly before they differ."""
    wanted = np.unique(np.array(rows, dtype=np.int64))
    documents, pairs = dict(zip(wanted.tolist(), signatures.documents(wanted), strict=True)), []
    for both in ([documents[row] for row in pair] for pair in rows):
        texts = [document["text"] for document in both]
        start = max(0, len(commonprefix(texts)) - _BEFORE)  # noqa: RUF071 - of characters, not of paths
        similarity = round(jaccard(*(shingles(text, settings) for text in texts)), 4)
        dropped, survivor = (
            {"id": document["id"], "url": document.get("url"), "text": text[start : start + _SHOWN]}
            for document, text in zip(both, texts, strict=True)
        )
        pairs.append([{**dropped, "similarity": similarity}, survivor])
    return pairs


def _describe_cluster(members: Members, signatures: Signatures, settings: DedupSettings) -> dict[str, Any]:
    """Size of the largest cluster, and the lowest similarity between some of its members."""
    order = np.argsort(members["key"], kind="stable")  # independent of shards
    sample = np.sort(members["row"][order[:_SAMPLE]])
    documents = list(signatures.documents(sample))
    sets = [shingles(document["text"], settings) for document in documents]
    lowest = min(jaccard(one, other) for number, one in enumerate(sets) for other in sets[:number])
    ids = sorted(document["id"] for document in documents)[:3]
    return {"documents": len(members), "lowest_similarity": round(lowest, 4), "ids": ids}


# ---------------------------------------------------------------------------------------------- phase 5: filter


def filter_shard(shard: Path, clusters: Path, output_dir: Path) -> Stats:
    """Write the survivors of a shard and, under `removed`, its other documents, in order.

    One process: sending a document to another takes longer than filtering it. Raises InputError when the shard has
    changed since its signatures were made.
    """
    with Segments(clusters) as file:
        rows = [row for part in file.each(shard_stem(shard)) for row in orjson.loads(part.tobytes())]
    removals = {index: (survivor, "exact" if same else "near") for index, survivor, same in rows}
    survivors, removed = outputs_of(shard, output_dir)
    step = ShardStep("dedup", [shard], removed, max_bad_share=None, allow_empty=True)
    with step.results(document_writer(survivors)) as results:
        # phase 1 reported the bad lines
        for index, document in enumerate(step.stats.counted(read_documents(shard, BadLines(1.0)))):
            if (removal := removals.pop(index, None)) is None:
                results.record(document)
            else:
                survivor, reason = removal
                results.record(Drop({**document, "survivor": survivor}, reason))
        if removals:
            raise InputError(f"{shard}: shorter than its signatures; run the phase `signatures` again")
    return step.stats


def outputs_of(shard: Path, output_dir: Path) -> tuple[Path, Path]:
    """The files for the survivors of a shard and for its removed documents."""
    name = f"{shard_stem(shard)}.jsonl.zst"
    return output_dir / name, output_dir / "removed" / name
