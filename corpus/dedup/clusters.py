"""Phase 4, one job, chooses survivors; phase 5, one job per shard, filters shards.

Groups of linked documents are the connected components over equal texts and edges;
corpus/dedup/survivors.py decides each. `all.clusters` has segments per shard, with its name: the
bytes of a JSON list of its removed documents, each [index in the shard, id of the kept document
that it resembles, whether their normalised texts are equal, similarity]. `all.removed` stays for
later runs: the segments `key`, of removed documents in ascending order, and `kept`, the hash of the
id of the kept document of each, both u64.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from common.errors import InputError
from common.files import BadLines, document_writer, naming, read_documents, scratch_file, shard_stem
from common.settings import DedupSettings
from common.stats import Stats
from corpus.dedup.figures import Figures
from corpus.dedup.pairs import Pairs, Rows, part_of, read_pairs
from corpus.dedup.signatures import REMOVALS, Signatures, hash_of
from corpus.dedup.survivors import EDGE, MEMBER, Choice, Edges, Members, choose
from corpus.runner import Drop, ShardStep
from corpus.segments import Segments, SegmentWriter, write_segments

_CHUNK = 1 << 16  # edges joined, or rows read, at a time
_BYTES_PER_MEMBER = 400  # a MEMBER, its id, Python's numbers for its text, sort orders
_BYTES_PER_EDGE = 150  # an EDGE, its sorted copy, Python's numbers
_MOST_PARTS = 200  # each has three open files


def write_clusters(
    signatures: Signatures,
    pair_files: Sequence[Path],
    edge_files: Sequence[Path],
    output: Path,
    settings: DedupSettings,
) -> dict[str, Any]:
    """Write the removed documents, and `all.removed` beside them; returns figures."""
    output.parent.mkdir(parents=True, exist_ok=True)
    forest = Forest(signatures.count, output.parent)
    clustered, n_edges = _zeros(signatures.count, np.bool_, output.parent), 0
    for pairs in _pairs(signatures, pair_files, edge_files):
        forest.join(pairs)
        clustered[pairs.ravel()] = True
        n_edges += len(pairs)
    size = int(clustered.sum()) * _BYTES_PER_MEMBER + n_edges * _BYTES_PER_EDGE
    parts = min(_MOST_PARTS, 1 + size // settings.memory_bytes)
    documents = signatures.count - signatures.earlier
    figures, info = Figures(signatures), {"documents": documents}
    with write_segments(output.with_name(REMOVALS), info) as removals, write_segments(output, info) as file:
        for members, ids, edges in _parts(signatures, forest, clustered, edge_files, parts, output.parent):
            choice = choose(members, edges, signatures, settings, output.parent)
            removed = np.flatnonzero(choice.survivor != np.arange(len(members)))
            assert (members["row"][removed] >= signatures.earlier).all(), "earlier documents are kept"
            assert (choice.survivor[choice.survivor] == choice.survivor).all(), "a survivor is never removed"
            _write_removed(file, members, ids, removed, choice, signatures)
            _write_removals(removals, members, ids, removed, choice.survivor)
            figures.add(members, ids, removed, choice)
    candidates = sum(int(Segments(path).info["candidates"]) for path in edge_files)
    return {"documents": documents, "candidate_pairs": candidates, "edges": n_edges, **figures.described()}


def _zeros(count: int, dtype: type, folder: Path) -> NDArray[Any]:
    """An array of zeros in an unnamed temporary file."""
    with scratch_file(folder) as file, naming(folder):
        # not truncate: on a full disk, writing to the map would then end the process (SIGBUS)
        os.posix_fallocate(file.fileno(), 0, max(1, count) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(max(1, count),))


class Forest:
    """Vectorised union-find over rows, with the parents in a temporary file, 8 bytes each."""

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


def _pairs(signatures: Signatures, pair_files: Sequence[Path], edge_files: Sequence[Path]) -> Iterator[Pairs]:
    """The pairs of equal texts, and those of the edges."""
    for block in range(len(pair_files)):
        yield read_pairs(pair_files, signatures, "exact", block)
    for edges in _edges(signatures, edge_files):
        yield np.stack([edges["one"], edges["other"]], axis=1)


def _edges(signatures: Signatures, paths: Sequence[Path]) -> Iterator[Edges]:
    for path in paths:
        with Segments(path) as file:
            signatures.check(file)
            for pairs, similarity in zip(file.each("edges"), file.each("similarity"), strict=True):
                edges = np.empty(len(similarity), dtype=EDGE)
                edges["one"], edges["other"] = pairs.reshape(-1, 2).T
                edges["similarity"] = similarity
                yield edges


def _parts(
    signatures: Signatures,
    forest: Forest,
    clustered: NDArray[np.bool_],
    edge_files: Sequence[Path],
    parts: int,
    folder: Path,
) -> Iterator[tuple[Members, list[bytes], Edges]]:
    """The `clustered` documents, their ids and their edges, in `parts` of whole groups.

    Every column is read once: the parts wait in temporary files.
    """
    with ExitStack() as stack:
        files = [[stack.enter_context(scratch_file(folder)) for _ in range(3)] for _ in range(parts)]
        for first, count, shard, chunk in signatures.chunks():
            rows = np.flatnonzero(clustered[first : first + count])
            if not len(rows):
                continue
            members = np.empty(len(rows), dtype=MEMBER)
            members["row"], members["root"] = first + rows, forest.roots(first + rows)
            for name in ("size", "key", "exact"):
                members[name] = shard.array(name, chunk)[rows]
            ends, ids = shard.array("ids_end", chunk), shard.array("ids", chunk).tobytes()
            starts = np.concatenate([[0], ends[:-1]])[rows]
            members["id_bytes"] = ends[rows] - starts
            part = part_of(members["root"], parts)
            for number in np.unique(part).tolist():
                own = part == number
                files[number][0].write(members[own].tobytes())
                spans = zip(starts[own].tolist(), members["id_bytes"][own].tolist(), strict=True)
                files[number][1].write(b"".join(ids[start : start + length] for start, length in spans))
        for edges in _edges(signatures, edge_files):
            part = part_of(forest.roots(edges["one"]), parts)
            for number in np.unique(part).tolist():
                files[number][2].write(edges[part == number].tobytes())
        for of_part in files:
            for file in of_part:
                file.seek(0)
            members = np.frombuffer(of_part[0].read(), dtype=MEMBER)
            names = [of_part[1].read(length) for length in members["id_bytes"].tolist()]
            yield members, names, np.frombuffer(of_part[2].read(), dtype=EDGE)


def _write_removed(
    file: SegmentWriter, members: Members, ids: Sequence[bytes], removed: Rows, choice: Choice, signatures: Signatures
) -> None:
    survivor = choice.survivor[removed]
    rows, exact = members["row"][removed], members["exact"][removed] == members["exact"][survivor]
    names = [ids[index].decode() for index in survivor.tolist()]
    similarity = [round(value, 4) for value in choice.similarity[removed].tolist()]
    starts = signatures.starts[-1 - len(signatures.own) :].tolist()
    for (start, end), shard in zip(pairwise(starts), signatures.own, strict=True):
        low, high = np.searchsorted(rows, [start, end])
        if high > low:
            indices, equal = (rows[low:high] - start).tolist(), exact[low:high].tolist()
            removals = list(zip(indices, names[low:high], equal, similarity[low:high], strict=True))
            file.append(shard.path.stem, np.frombuffer(orjson.dumps(removals), dtype=np.uint8))


def _write_removals(file: SegmentWriter, members: Members, ids: Sequence[bytes], removed: Rows, survivor: Rows) -> None:
    # without those whose kept document has the same id and text: a key cannot tell them apart
    removed = removed[members["key"][removed] != members["key"][survivor[removed]]]
    removed = removed[np.argsort(members["key"][removed], kind="stable")]
    kept = np.array([hash_of(ids[index].decode()) for index in survivor[removed].tolist()], dtype=np.uint64)
    file.append("key", members["key"][removed])
    file.append("kept", kept)


# ---------------------------------------------------------------- phase 5: filter


def filter_shard(shard: Path, clusters: Path, output_dir: Path) -> Stats:
    """Write the survivors of a shard and, under `removed`, its other documents, in order.

    One process: sending a document to another takes longer than filtering it. Raises InputError if
    the shard has changed since its signatures were made.
    """
    with Segments(clusters) as file:
        rows = [row for part in file.each(shard_stem(shard)) for row in orjson.loads(part.tobytes())]
    removals = {index: removal for index, *removal in rows}
    survivors, removed = outputs_of(shard, output_dir)
    step = ShardStep("dedup", [shard], removed, max_bad_share=None, allow_empty=True)
    with step.results(document_writer(survivors)) as results:
        # phase 1 reported the bad lines
        for index, document in enumerate(step.stats.counted(read_documents(shard, BadLines(1.0)))):
            if (removal := removals.pop(index, None)) is None:
                results.record(document)
            else:
                survivor, equal, similarity = removal
                removed_document = {**document, "survivor": survivor, "similarity": similarity}
                results.record(Drop(removed_document, "exact" if equal else "near"))
        if removals:
            raise InputError(f"{shard}: shorter than its signatures; run the phase `signatures` again")
    return step.stats


def outputs_of(shard: Path, output_dir: Path) -> tuple[Path, Path]:
    """The files for the survivors of a shard and for its removed documents."""
    name = f"{shard_stem(shard)}.jsonl.zst"
    return output_dir / name, output_dir / "removed" / name
