"""Remove exact and near duplicates. Each removed document resembles a kept one, and names it.

    python -m corpus.dedup run --input clean/*.jsonl.zst --output-dir dedup
    python -m corpus.dedup run --input clean --output-dir dedup dedup.threshold=0.8 --workers 4

Survivors go to DIR/<shard>.jsonl.zst in their order, the others to DIR/removed/<shard>.jsonl.zst,
each with the id of its `survivor` and their similarity. Two documents are duplicates if their
normalised texts are equal, or if the true Jaccard similarity of their sets of character 5-grams
reaches the threshold; MinHash-LSH only finds what to compare. The longest come first: a document
is kept unless a kept one is its duplicate. Shards, order and workers make no difference.

`run` does everything on one machine; the figures are in DIR/clusters.json. After a kill, the same
command continues after the last finished phase. On a cluster each phase is a job (docs/dedup.md):

    python -m corpus.dedup signatures --input clean/0000.jsonl.zst --work work
    python -m corpus.dedup bands      --work work --part 0/8
    python -m corpus.dedup verify     --work work --part 0/8
    python -m corpus.dedup clusters   --work work
    python -m corpus.dedup filter     --input clean/0000.jsonl.zst --work work --output-dir dedup

One job of `bands` or `verify` may do several parts: `--part 0/8 4/8`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from common import cli
from common.console import warn
from common.errors import EmptyResultError, InputError
from common.files import (
    check_outputs,
    digest,
    expand_inputs,
    require_distinct_stems,
    require_regular,
    shard_paths,
    shard_stem,
    write_json,
)
from common.files.writing import first_foreign_file, remove_own
from common.settings import DedupSettings, Settings
from common.stats import Stats, no_documents
from common.workers import Workers
from corpus.dedup.clusters import filter_shard, outputs_of, write_clusters
from corpus.dedup.pairs import write_edges, write_pairs
from corpus.dedup.signatures import Signatures, fingerprint, place_of, write_signatures
from corpus.phases import SHARD, Phase, option, run_phase
from corpus.segments import Segments

_OWN = re.compile(r".+\.(signatures|pairs|edges|clusters|removed)(\.tmp)?")  # files in the folder work.tmp/
_CLUSTERS, _FIGURES = "all.clusters", "clusters.json"

Share = tuple[int, int]
"""(J, N): part J of N."""


def dedup(
    inputs: Sequence[Path], output_dir: Path, settings: DedupSettings, workers: int = 1, max_bad_share: float = 0.001
) -> Stats:
    """Deduplicate shards together, all phases through one pool of workers.

    Continues from what a killed run has finished, if the shards have the same content. Raises
    InputError for unreadable input and for a folder work.tmp/ that holds other files,
    EmptyResultError if there is no document at all.
    """
    work = output_dir / "work.tmp"  # not `work`, where the phases on a cluster write
    if work.exists() and first_foreign_file(work, _OWN.fullmatch):
        remove_own(work, _OWN.fullmatch)  # raises InputError
    try:
        stats = _all_phases(inputs, work, output_dir, settings, workers, max_bad_share)
    except (InputError, EmptyResultError):
        remove_own(work, _OWN.fullmatch)
        with suppress(OSError):  # leave no empty folder
            output_dir.rmdir()
        raise
    remove_own(work, _OWN.fullmatch)
    assert stats.documents_in == stats.documents_out + stats.reasons.total(), "no document is lost"
    return stats


def _all_phases(
    inputs: Sequence[Path], work: Path, output_dir: Path, settings: DedupSettings, workers: int, max_bad_share: float
) -> Stats:
    stats, files = Stats("dedup"), [_signatures_of(path, work) for path in inputs]
    with Workers(workers) as pool:
        for path, output in zip(inputs, files, strict=True):
            content = {"settings": fingerprint(settings), "source": digest(path), "shard": place_of(path, output)}
            if not _is_finished(output, content | {"bad_lines": 0}):
                write_signatures(path, output, settings, pool, max_bad_share)
        signatures = Signatures(files, settings)
        if signatures.count == signatures.earlier:
            raise EmptyResultError(no_documents(inputs, inputs[0].parent.parent))
        stats.extra["bad_lines"] = sum(shard.info["bad_lines"] for shard in signatures.own)
        for phase, kind, key in ((_bands, "pairs", "ranges"), (_verify, "edges", "threshold")):
            made = {"jobs": workers, "signatures": signatures.digest, key: getattr(settings, key)}
            parts = (part for part in range(workers) if not _is_finished(work / f"{part}.{kind}", made))
            list(pool.map(partial(phase, work, files, settings), [(part, workers) for part in parts]))
        figures = _clusters(work, files, settings)
        filtered = partial(filter_shard, clusters=work / _CLUSTERS, output_dir=output_dir)
        for of_shard in pool.map(filtered, inputs):
            stats.add(of_shard)
    write_json(output_dir / _FIGURES, figures)
    stats.extra |= figures
    return stats


def _is_finished(path: Path, made: Mapping[str, Any]) -> bool:
    """Whether a killed run has finished a file, from the same content with the same settings."""
    try:
        info = Segments(path).info
    except InputError:  # missing, or cut short
        return False
    return all(info.get(name) == value for name, value in made.items())


def _bands(work: Path, files: Sequence[Path], settings: DedupSettings, share: Share) -> str:
    """Phase 2: write the pairs of one share of the columns; returns a line about them."""
    part, parts = share
    signatures = Signatures(files, settings)
    if signatures.count == signatures.earlier:
        raise EmptyResultError(no_documents(files, work.parent.parent))
    count = write_pairs(signatures, work / f"{part}.pairs", settings, part, parts)
    return f"dedup bands {part}/{parts}: {count} pairs of {signatures.count} documents"


def _verify(work: Path, files: Sequence[Path], settings: DedupSettings, share: Share) -> str:
    """Phase 3: write the edges of one share of the pairs; returns a line about them."""
    block, blocks = share
    pair_files = [work / f"{part}.pairs" for part in range(blocks)]
    candidates, edges = write_edges(Signatures(files, settings), pair_files, work / f"{block}.edges", settings, block)
    return f"dedup verify {block}/{blocks}: {edges} of {candidates} pairs are duplicates"


def _clusters(work: Path, files: Sequence[Path], settings: DedupSettings) -> dict[str, Any]:
    """Phase 4: write the removed documents of all shards; returns figures for the statistics."""
    parts = range(Segments(work / "0.pairs").info["jobs"])
    pairs, edges = ([work / f"{part}.{kind}" for part in parts] for kind in ("pairs", "edges"))
    return write_clusters(Signatures(files, settings), pairs, edges, work / _CLUSTERS, settings)


# ---------------------------------------------------------------- command line


def _run(arguments: argparse.Namespace, settings: Settings) -> None:
    if warning := settings.dedup.low_recall():
        warn(warning)
    shards = expand_inputs(arguments.input, "shards")
    require_regular(shards, "corpus.dedup run")
    require_distinct_stems(shards)
    outputs = [path for shard in shards for path in outputs_of(shard, arguments.output_dir)]
    check_outputs([*outputs, arguments.output_dir / _FIGURES, arguments.stats], shards)
    stats = dedup(shards, arguments.output_dir, settings.dedup, arguments.workers, settings.max_bad_share)
    stats.finish(arguments.stats)


def _sign(arguments: argparse.Namespace, settings: Settings) -> None:
    if warning := settings.dedup.low_recall():
        warn(warning)
    require_regular([arguments.input], "deduplication")
    output = _signatures_of(arguments.input, arguments.work)
    with Workers(arguments.workers) as pool:
        count = write_signatures(arguments.input, output, settings.dedup, pool, settings.max_bad_share)
    print(f"dedup signatures: {count} documents")


def _each_share(phase: Callable[..., str], arguments: argparse.Namespace, settings: Settings) -> None:
    files = _signature_files(arguments)
    for share in arguments.part:
        print(phase(arguments.work, files, settings.dedup, share))


def _choose(arguments: argparse.Namespace, settings: Settings) -> None:
    figures = _clusters(arguments.work, _signature_files(arguments), settings.dedup)
    if arguments.stats:
        write_json(arguments.stats, figures)
    print(f"dedup clusters: {figures['edges']} edges between {figures['documents']} documents")


def _filter(arguments: argparse.Namespace, _: Settings) -> None:
    require_regular([arguments.input], "deduplication")
    check_outputs([*outputs_of(arguments.input, arguments.output_dir), arguments.stats], [arguments.input])
    filter_shard(arguments.input, arguments.work / _CLUSTERS, arguments.output_dir).finish(arguments.stats)


def _signatures_of(shard: Path, work: Path) -> Path:
    return work / f"{shard_stem(shard)}.signatures"


def _signature_files(arguments: argparse.Namespace) -> list[Path]:
    """The signatures in the folder, or only those of the first `--shards`."""
    if arguments.shards is not None:
        return shard_paths(arguments.work, arguments.shards, ".signatures")
    paths = sorted(arguments.work.glob("*.signatures"))
    if not paths:
        raise InputError(f"{arguments.work}: no *.signatures inside; run the phase `signatures` first")
    return paths


def _share(text: str) -> Share:
    """`2/8`: the third of eight shares."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError("must read J/N with J from 0 to N - 1")
    return int(number), int(count)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    work = option("--work", type=cli.output_folder, metavar="DIR", help="working folder")
    shards = option("--shards", type=cli.positive_int, required=False, metavar="N", help="only 0000 to N - 1")
    part = option("--part", type=_share, nargs="+", metavar="J/N", help="share of the work")
    output = option("--output-dir", type=cli.output_folder, metavar="DIR", help="survivors, removed/")
    workers, stats = cli.add_workers, cli.add_stats
    bands, verify = partial(_each_share, _bands), partial(_each_share, _verify)
    phases = (
        Phase("run", _run, "all phases on one machine", (cli.add_input, output, workers, stats)),
        Phase("signatures", _sign, "phase 1: signatures of the documents of a shard", (SHARD, work, workers)),
        Phase("bands", bands, "phase 2: pair the documents that agree in a band", (work, shards, part)),
        Phase("verify", verify, "phase 3: the true similarity of the pairs", (work, shards, part)),
        Phase("clusters", _choose, "phase 4: the survivors of each group of linked documents", (work, shards, stats)),
        Phase("filter", _filter, "phase 5: the survivors of a shard", (SHARD, work, output, stats)),
    )
    return run_phase("corpus.dedup", __doc__, "dedup", phases, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
