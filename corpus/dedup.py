"""Remove exact and near duplicates: exactly one document of every cluster survives, always the same one.

    python -m corpus.dedup run --input clean/*.jsonl.zst --output-dir dedup
    python -m corpus.dedup run --input clean --output-dir dedup --threshold 0.8 --stats dedup/stats.json --workers 4

Survivors go to DIR/<shard>.jsonl.zst, in their order; the others to DIR/removed/<shard>.jsonl.zst, each with the id of
its `survivor`. Two documents are duplicates when their normalised texts are equal, or when the true Jaccard
similarity of their character 5-gram sets reaches the threshold; MinHash-LSH only proposes the pairs to compare.
The longest document of a cluster survives, ties go to the smallest id: never a matter of shards, order or workers.
"""

import hashlib
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import BadLines, Document, document_writer, expand_inputs, read_documents, read_shards
from common.progress import Meter
from common.settings import DedupSettings
from common.stats import Stats
from common.workers import batched, ordered_map

_BATCH = 64  # documents sent to a worker at once
_SPACES = re.compile(r"\s+")
_MANY = 10_000  # a corpus of this size without one duplicate is more likely a mistake than a miracle

Pairs = npt.NDArray[np.int64]
"""Rows of two documents that belong together, shape (pairs, 2), first < second."""


def normalised(text: str) -> str:
    """The form whose equality makes an exact duplicate: NFKC, case folded, white space folded."""
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def shingles(text: str, length: int) -> set[str]:
    """All character n-grams of a text; a text shorter than one is its own only shingle."""
    return {text[start : start + length] for start in range(max(1, len(text) - length + 1))}


def jaccard(first: set[str], second: set[str]) -> float:
    """Size of the intersection over size of the union."""
    common = len(first & second)
    return common / (len(first) + len(second) - common)


@dataclass(frozen=True)
class Corpus:
    """What is remembered of N documents, in an order that depends on nothing but the documents (id, then text)."""

    ids: list[str]
    sizes: npt.NDArray[np.int64]
    """Characters of each text, shape (N,)."""
    exact: npt.NDArray[np.void]
    """Hash of the normalised text, shape (N,), 16 bytes each."""
    signatures: npt.NDArray[np.uint32]
    """MinHash values, shape (N, bands * rows)."""
    place: npt.NDArray[np.int64]
    """Row of the document read first, second, …: shape (N,)."""


def describe(settings: DedupSettings, documents: list[Document]) -> list[tuple[str, int, bytes, bytes, Any]]:
    """(id, characters, hash of the text, hash of the normalised text, MinHash values) of each document."""
    from datasketch import MinHash

    described = []
    for document in documents:
        text: str = document["text"]
        # scheme and seed are stated, so that a later version of the library cannot change who survives
        minhash = MinHash(num_perm=settings.bands * settings.rows, seed=settings.seed, scheme="affine32")
        minhash.update_batch([shingle.encode() for shingle in shingles(text, settings.shingle_characters)])
        digests = (hashlib.blake2b(t.encode(), digest_size=16).digest() for t in (text, normalised(text)))
        described.append((document["id"], len(text), *digests, minhash.hashvalues))
    return described


def read_corpus(documents: Iterator[Document], settings: DedupSettings, workers: int) -> Corpus:
    """Describe every document; about 4 * bands * rows + 150 bytes each are kept."""
    rows: list[tuple[str, int, bytes, bytes, Any]] = []
    with Meter("dedup signatures", "documents") as meter:
        for batch in ordered_map(partial(describe, settings), batched(documents, _BATCH), workers):
            rows.extend(batch)
            meter.advance(len(batch))
    order = sorted(range(len(rows)), key=lambda row: (rows[row][0], rows[row][2]))
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows))
    return Corpus(
        ids=[rows[row][0] for row in order],
        sizes=np.array([rows[row][1] for row in order], dtype=np.int64),
        exact=np.array([rows[row][3] for row in order], dtype="V16"),
        signatures=np.array([rows[row][4] for row in order], dtype=np.uint32),
        place=place,
    )


def pairs_in_groups(keys: npt.NDArray[Any]) -> Pairs:
    """Pairs of rows with equal keys: each row with the first and with the previous one of its group.

    O(n) pairs for a group of any size; transitive closure joins the rest.
    """
    _, group = np.unique(keys, return_inverse=True)
    order = np.argsort(group, kind="stable")  # rows of a group stay in row order
    ordered = group[order]
    new = np.flatnonzero(np.diff(ordered, prepend=-1))
    first = order[np.repeat(new, np.diff(np.append(new, len(order))))]
    previous = np.roll(order, 1)
    follows = order != first
    pairs = np.stack([np.concatenate([first[follows], previous[follows]]), np.tile(order[follows], 2)], axis=1)
    return np.unique(pairs, axis=0).reshape(-1, 2)


def candidate_pairs(corpus: Corpus, settings: DedupSettings) -> Pairs:
    """Pairs that agree in all values of at least one band."""
    found = []
    for band in range(settings.bands):
        values = np.ascontiguousarray(corpus.signatures[:, band * settings.rows : (band + 1) * settings.rows])
        found.append(pairs_in_groups(values.view(f"V{values.itemsize * settings.rows}").ravel()))
    return np.unique(np.concatenate(found), axis=0).reshape(-1, 2)


def verified_pairs(pairs: Pairs, texts: dict[int, str], settings: DedupSettings) -> Pairs:
    """The pairs whose true Jaccard similarity reaches the threshold; `texts` by row."""
    kept = np.zeros(len(pairs), dtype=bool)
    row, row_shingles = -1, set[str]()
    for number, (first, second) in enumerate(pairs.tolist()):  # sorted by `first`: its shingles are made once
        if first != row:
            row, row_shingles = first, shingles(texts[first], settings.shingle_characters)
        other = shingles(texts[second], settings.shingle_characters)
        kept[number] = jaccard(row_shingles, other) >= settings.threshold
    return pairs[kept]


def survivors(corpus: Corpus, edges: Pairs) -> npt.NDArray[np.int64]:
    """Row of the survivor of each row's cluster, shape (N,): the longest text, ties to the smallest id."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(corpus.ids)
    graph = coo_array((np.ones(len(edges), dtype=np.int8), (edges[:, 0], edges[:, 1])), shape=(count, count))
    clusters, label = connected_components(graph, directed=False)
    order = np.lexsort((np.arange(count), -corpus.sizes, label))  # by cluster, then longest, then id
    first = np.flatnonzero(np.diff(label[order], prepend=-1))
    assert len(first) == clusters, "every cluster has exactly one survivor"
    best: npt.NDArray[np.int64] = order[first].astype(np.int64)
    chosen: npt.NDArray[np.int64] = best[label]
    return chosen


def shard_names(inputs: Sequence[Path]) -> list[str]:
    """Name of the output shard of each input; InputError when two inputs would write one file."""
    names = [f"{path.name.split('.jsonl')[0]}.jsonl.zst" for path in inputs]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise InputError(f"{name}: two inputs have this file name; rename one of them")
    return names


def dedup(
    inputs: Sequence[Path],
    output_dir: Path,
    settings: DedupSettings,
    workers: int = 1,
    max_bad_share: float = 0.001,
) -> Stats:
    """Deduplicate shards together; see the module's docstring for the rules and the files.

    Raises InputError for unreadable input, EmptyResultError when there is no document at all.
    """
    names = shard_names(inputs)
    stats, bad = Stats("dedup"), BadLines(max_bad_share)
    corpus = read_corpus(read_shards(inputs, bad), settings, workers)
    bad.check()
    if not corpus.ids:
        raise EmptyResultError.no_documents(inputs)
    exact = pairs_in_groups(corpus.exact)
    candidates = candidate_pairs(corpus, settings)
    wanted = set(candidates.ravel().tolist())
    # A bad line was skipped in the first pass as well, so that documents are numbered alike in every pass.
    ignore = BadLines(1.0)
    texts = {
        row: document["text"]
        for row, document in zip(corpus.place.tolist(), read_shards(inputs, ignore), strict=True)
        if row in wanted
    }
    near = verified_pairs(candidates, texts, settings)
    survivor = survivors(corpus, np.concatenate([exact, near]))

    position = 0
    exact_hash = corpus.exact
    for path, name in zip(inputs, names, strict=True):
        with document_writer(output_dir / name) as keep, document_writer(output_dir / "removed" / name) as remove:
            for document in stats.counted(read_documents(path, ignore)):
                row = int(corpus.place[position])
                position += 1
                best = int(survivor[row])
                if best == row:
                    stats.keep(len(document["text"].encode()))
                    keep(document)
                else:
                    reason = "exact" if exact_hash[best] == exact_hash[row] else "near"
                    stats.reasons[reason] += 1
                    remove({**document, "survivor": corpus.ids[best], "reason": reason})
    sizes = np.unique(np.unique(survivor, return_counts=True)[1], return_counts=True)
    stats.extra.update(
        bad_lines=bad.bad,
        candidate_pairs=len(candidates),
        verified_pairs=len(near),
        cluster_sizes={str(size): int(count) for size, count in zip(*sizes, strict=True)},
    )
    assert stats.documents_in == stats.documents_out + stats.reasons.total(), "no document is lost"
    if stats.documents_in > _MANY and not stats.reasons:
        print(f"warning: not one duplicate among {stats.documents_in} documents; is that right?", file=sys.stderr)
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.dedup", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="all phases on one machine")
    run.add_argument("--input", nargs="+", required=True, metavar="FILE", help="shards of documents")
    run.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="survivors; DIR/removed for the rest"
    )
    run.add_argument("--threshold", type=float, metavar="T", help="Jaccard similarity of duplicates (default 0.7)")
    run.add_argument("--stats", type=Path, metavar="FILE", help="what was counted, as JSON")
    run.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="processes (default 1)")
    run.add_argument("--config", type=Path, metavar="FILE", help="read the section `dedup`")
    arguments = parser.parse_args(argv)
    settings = step_settings(arguments.config)
    rules = settings.dedup
    if arguments.threshold is not None:
        if not 0 < arguments.threshold <= 1:
            parser.error("--threshold must be above 0 and at most 1")
        rules = rules.model_copy(update={"threshold": arguments.threshold})
    stats = dedup(
        expand_inputs(arguments.input), arguments.output_dir, rules, arguments.workers, settings.max_bad_share
    )
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
