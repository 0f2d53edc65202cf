"""Deduplicate on one machine: all phases through one pool of workers."""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.errors import EmptyResultError
from common.files import require_distinct_stems, shard_stem
from common.folders import remove_own
from common.settings import DedupSettings
from common.stats import Stats
from common.workers import Workers
from corpus.dedup.clusters import filter_shard, write_clusters
from corpus.dedup.pairs import write_edges, write_pairs
from corpus.dedup.signatures import Signatures, describe_shards

_OWN = re.compile(r".+\.(signatures|pairs|edges|clusters)(\.tmp)?")  # files in the folder work.tmp/


def _pairs(signatures: Sequence[Path], folder: Path, settings: DedupSettings, parts: int, part: int) -> Path:
    output = folder / f"{part}.pairs"
    with Signatures(signatures, settings) as opened:
        write_pairs(opened, output, settings, part, parts)
    return output


def _edges(
    signatures: Sequence[Path], pairs: Sequence[Path], folder: Path, settings: DedupSettings, block: int
) -> Path:
    output = folder / f"{block}.edges"
    with Signatures(signatures, settings) as opened:
        write_edges(opened, pairs, output, settings, block)
    return output


def dedup(
    inputs: Sequence[Path],
    output_dir: Path,
    settings: DedupSettings,
    workers: int = 1,
    max_bad_share: float = 0.001,
) -> Stats:
    """Deduplicate shards together; see `python -m corpus.dedup --help` for the rules and the files.

    Raises InputError for unreadable input and for a folder work.tmp/ that holds other files, EmptyResultError if there
    is no document at all.
    """
    require_distinct_stems(inputs)
    stats = Stats("dedup")
    folder = output_dir / "work.tmp"  # not `work`, where the phases on a cluster write
    remove_own(folder, _OWN.fullmatch)  # what a killed run left
    try:
        with Workers(workers) as pool:  # ends before its working folder is removed
            signatures = [folder / f"{shard_stem(path)}.signatures" for path in inputs]
            describe_shards(inputs, signatures, settings, pool, max_bad_share)
            with Signatures(signatures, settings) as opened:
                if not opened.count:
                    raise EmptyResultError(f"{inputs[0]}: no documents in {len(inputs)} shard(s)")
                stats.extra["bad_lines"] = sum(shard.info["bad_lines"] for shard in opened.shards)
            parts = range(workers)
            pairs = list(pool.map(partial(_pairs, signatures, folder, settings, workers), parts))
            edges = list(pool.map(partial(_edges, signatures, pairs, folder, settings), parts))
            with Signatures(signatures, settings) as opened:
                stats.extra |= write_clusters(opened, pairs, edges, folder / "all.clusters", settings)
            filtered = partial(filter_shard, clusters=folder / "all.clusters", output_dir=output_dir)
            for part in pool.map(filtered, inputs):
                stats.add(part)
    finally:
        remove_own(folder, _OWN.fullmatch)
        with suppress(OSError):  # leave no empty folder after bad input
            output_dir.rmdir()
    assert stats.documents_in == stats.documents_out + stats.reasons.total(), "no document is lost"
    return stats
