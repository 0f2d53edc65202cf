"""Remove exact and near duplicates: exactly one document of every cluster survives, always the same one.

    python -m corpus.dedup run --input clean/*.jsonl.zst --output-dir dedup
    python -m corpus.dedup run --input clean --output-dir dedup --threshold 0.8 --stats dedup/stats.json --workers 4

Survivors go to DIR/<shard>.jsonl.zst, in their order; the others to DIR/removed/<shard>.jsonl.zst, each with the id of
its `survivor`. Two documents are duplicates when their normalised texts are equal, or when the true Jaccard
similarity of their character 5-gram sets reaches the threshold; MinHash-LSH only proposes the pairs to compare.
The longest document of a cluster survives, ties go to the smallest id: never a matter of shards, order or workers.

`run` does it all on one machine. On a cluster each phase is a job of its own (docs/dedup.md):

    python -m corpus.dedup signatures --input clean/0000.jsonl.zst --output work/0000.signatures
    python -m corpus.dedup bands      --signatures work --part 0/8 --output work/0.pairs
    python -m corpus.dedup verify     --signatures work --pairs work --block 0/8 --output work/0.edges
    python -m corpus.dedup clusters   --signatures work --pairs work --edges work --output work/all.clusters
    python -m corpus.dedup filter     --input clean/0000.jsonl.zst --clusters work/all.clusters --output-dir dedup

One job of `bands` or `verify` may make several files: `--part 0/8 4/8 --output work/0.pairs work/4.pairs`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import check_outputs, expand_inputs, require_regular, write_json


def _share(text: str) -> tuple[int, int]:
    """`2/8`: the third of eight jobs."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError("must read J/N with J from 0 to N - 1")
    return int(number), int(count)


def _signatures(folder: Path, shards: int | None) -> list[Path]:
    """The signatures in a folder: all of them, or those of the first shards, should others be left from another run."""
    if shards is not None:
        return [folder / f"{shard:04d}.signatures" for shard in range(shards)]
    found = sorted(folder.glob("*.signatures"))
    if not found:
        raise InputError(f"{folder}: no *.signatures inside; run the phase `signatures`")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("corpus.dedup", __doc__)
    phases = parser.add_subparsers(dest="phase", required=True)

    def phase(name: str, summary: str) -> argparse.ArgumentParser:
        command = phases.add_parser(name, help=summary)
        command.add_argument("--config", type=cli.input_path, metavar="FILE", help="read the section `dedup`")
        command.add_argument("--threshold", type=float, metavar="T", help="Jaccard similarity of duplicates (0.7)")
        return command

    def add_folders(command: argparse.ArgumentParser, *names: str) -> None:
        for name in names:
            command.add_argument(
                f"--{name}", type=cli.input_path, required=True, metavar="DIR", help=f"folder of *.{name}"
            )
        command.add_argument("--shards", type=cli.positive_int, metavar="N", help="only the shards 0000 to N - 1")

    def add_shares(command: argparse.ArgumentParser, option: str, summary: str) -> None:
        command.add_argument("--output", type=cli.output_file, nargs="+", required=True, metavar="FILE")
        command.add_argument(option, dest="shares", type=_share, nargs="+", required=True, metavar="J/N", help=summary)

    run = phase("run", "all phases on one machine")
    run.add_argument("--input", type=cli.shards, nargs="+", required=True, metavar="FILE", help="shards of documents")
    run.add_argument(
        "--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="survivors; DIR/removed: the rest"
    )
    run.add_argument("--stats", type=cli.output_file, metavar="FILE", help="what was counted, as JSON")
    run.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="processes (default 1)")
    signatures = phase("signatures", "phase 1: describe the documents of a shard")
    signatures.add_argument("--input", type=cli.input_path, required=True, metavar="FILE", help="shard of documents")
    signatures.add_argument("--output", type=cli.output_file, required=True, metavar="FILE")
    signatures.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="processes (default 1)")
    bands = phase("bands", "phase 2: pair the documents that agree in a band")
    verify = phase("verify", "phase 3: the true similarity of the pairs")
    add_folders(bands, "signatures")
    add_shares(bands, "--part", "share of the bands in each output")
    add_folders(verify, "signatures", "pairs")
    add_shares(verify, "--block", "share of the pairs in each output")
    clusters = phase("clusters", "phase 4: who survives")
    add_folders(clusters, "signatures", "pairs", "edges")
    clusters.add_argument("--output", type=cli.output_file, required=True, metavar="FILE")
    clusters.add_argument("--stats", type=cli.output_file, metavar="FILE", help="clusters by size, as JSON")
    filters = phase("filter", "phase 5: the survivors of a shard")
    filters.add_argument("--input", type=cli.input_path, required=True, metavar="FILE", help="shard of documents")
    filters.add_argument("--clusters", type=cli.input_path, required=True, metavar="FILE")
    filters.add_argument(
        "--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="survivors; DIR/removed: the rest"
    )
    filters.add_argument("--stats", type=cli.output_file, metavar="FILE", help="what was counted, as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    whole = step_settings(arguments.config)
    settings = whole.dedup
    if arguments.threshold is not None:
        if not 0 < arguments.threshold <= 1:
            parser.error("--threshold must be above 0 and at most 1")
        settings = settings.model_copy(update={"threshold": arguments.threshold})
    shares: list[tuple[tuple[int, int], Path]] = []
    if arguments.phase in ("bands", "verify"):
        if len(arguments.shares) != len(arguments.output):
            parser.error(f"{len(arguments.output)} --output for {len(arguments.shares)} shares; give one for each")
        shares = list(zip(arguments.shares, arguments.output, strict=True))

    from corpus.dedup.clusters import write_clusters
    from corpus.dedup.filter import filter_shard, outputs_of
    from corpus.dedup.pairs import jobs_of, write_pairs
    from corpus.dedup.run import check_names, dedup
    from corpus.dedup.signatures import Signatures, write_signatures
    from corpus.dedup.verify import write_edges

    if arguments.phase == "run":
        shards = expand_inputs(arguments.input, "shards")
        require_regular(shards, "corpus.dedup run")
        check_names(shards)
        outputs = [path for shard in shards for path in outputs_of(shard, arguments.output_dir)]
        check_outputs([*outputs, arguments.stats], shards)
        stats = dedup(shards, arguments.output_dir, settings, arguments.workers, whole.max_bad_share)
        stats.finish(arguments.stats)
    elif arguments.phase == "signatures":
        count = write_signatures(arguments.input, arguments.output, settings, arguments.workers, whole.max_bad_share)
        print(f"dedup signatures: {count} documents")
    elif arguments.phase == "filter":
        require_regular([arguments.input], "deduplication")
        check_outputs([*outputs_of(arguments.input, arguments.output_dir), arguments.stats], [arguments.input])
        filter_shard(arguments.input, arguments.clusters, arguments.output_dir).finish(arguments.stats)
    else:
        folders = {name: getattr(arguments, name, None) for name in ("signatures", "pairs", "edges")}
        inputs = (path for name, folder in folders.items() if folder for path in folder.glob(f"*.{name}"))
        written = [output for _, output in shares] or [arguments.output]
        check_outputs([*written, getattr(arguments, "stats", None)], inputs)
        with Signatures(_signatures(arguments.signatures, arguments.shards), settings) as opened:
            if arguments.phase == "bands":
                if not opened.count:
                    raise EmptyResultError.no_documents([shard.path for shard in opened.shards])
                for (part, parts), output in shares:
                    count = write_pairs(opened, output, settings, part, parts)
                    print(f"dedup bands {part}/{parts}: {count} pairs of {opened.count} documents")
                return 0
            if arguments.phase == "verify":
                for (block, blocks), output in shares:
                    pair_files = [arguments.pairs / f"{job}.pairs" for job in range(blocks)]
                    candidates, edges = write_edges(opened, pair_files, output, settings, block)
                    print(f"dedup verify {block}/{blocks}: {edges} of {candidates} pairs are duplicates")
                return 0
            jobs = jobs_of(arguments.pairs / "0.pairs")
            pair_files = [arguments.pairs / f"{job}.pairs" for job in range(jobs)]
            edge_files = [arguments.edges / f"{job}.edges" for job in range(jobs)]
            figures: dict[str, Any] = write_clusters(opened, pair_files, edge_files, arguments.output, settings)
            if arguments.stats:
                write_json(arguments.stats, figures)
            print(f"dedup clusters: {figures['edges']} edges between {figures['documents']} documents")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
