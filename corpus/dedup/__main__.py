"""Remove exact and near duplicates: one document of every cluster survives, always the same one.

    python -m corpus.dedup run --input clean/*.jsonl.zst --output-dir dedup
    python -m corpus.dedup run --input clean --output-dir dedup dedup.threshold=0.8 --stats dedup/stats.json --workers 4

Survivors go to DIR/<shard>.jsonl.zst in their order, the others to DIR/removed/<shard>.jsonl.zst, each with the id of
its `survivor`. Two documents are duplicates if their normalised texts are equal, or if the true Jaccard similarity of
their character 5-gram sets reaches the threshold; MinHash-LSH only proposes the pairs to compare. The longest document
of a cluster survives, ties go to the smallest id; shards, order and workers make no difference.

`run` does everything on one machine. On a cluster each phase is a job (docs/dedup.md):

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

from common import cli
from common.console import warn
from common.errors import EmptyResultError, InputError
from common.files import check_outputs, expand_inputs, require_distinct_stems, require_regular, shard_paths, write_json
from common.settings import Settings

Share = tuple[int, int]
"""(J, N): job J of N."""


def _share(text: str) -> Share:
    """`2/8`: the third of eight jobs."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError("must read J/N with J from 0 to N - 1")
    return int(number), int(count)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("corpus.dedup", __doc__)
    phases = parser.add_subparsers(dest="phase", required=True)

    def phase(name: str, summary: str) -> argparse.ArgumentParser:
        command = phases.add_parser(name, help=summary)
        cli.add_settings(command, "dedup")
        return command

    def add_shard(command: argparse.ArgumentParser) -> None:
        command.add_argument("--input", type=cli.input_path, required=True, metavar="FILE", help="shard of documents")

    def add_folders(command: argparse.ArgumentParser, *names: str) -> None:
        for name in names:
            command.add_argument(
                f"--{name}", type=cli.input_path, required=True, metavar="DIR", help=f"folder of *.{name}"
            )
        command.add_argument("--shards", type=cli.positive_int, metavar="N", help="only the shards 0000 to N - 1")

    def add_shares(command: argparse.ArgumentParser, option: str, summary: str) -> None:
        command.add_argument("--output", type=cli.output_file, nargs="+", required=True, metavar="FILE")
        command.add_argument(option, dest="shares", type=_share, nargs="+", required=True, metavar="J/N", help=summary)

    def add_output_dir(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--output-dir",
            type=cli.output_folder,
            required=True,
            metavar="DIR",
            help="survivors; DIR/removed: the rest",
        )
        cli.add_stats(command)

    run = phase("run", "all phases on one machine")
    cli.add_input(run)
    add_output_dir(run)
    cli.add_workers(run)
    signatures = phase("signatures", "phase 1: signatures of the documents of a shard")
    add_shard(signatures)
    signatures.add_argument("--output", type=cli.output_file, required=True, metavar="FILE")
    cli.add_workers(signatures)
    bands = phase("bands", "phase 2: pair the documents that agree in a band")
    add_folders(bands, "signatures")
    add_shares(bands, "--part", "share of the bands in each output")
    verify = phase("verify", "phase 3: the true similarity of the pairs")
    add_folders(verify, "signatures", "pairs")
    add_shares(verify, "--block", "share of the pairs in each output")
    clusters = phase("clusters", "phase 4: which documents survive")
    add_folders(clusters, "signatures", "pairs", "edges")
    clusters.add_argument("--output", type=cli.output_file, required=True, metavar="FILE")
    cli.add_stats(clusters)
    filters = phase("filter", "phase 5: the survivors of a shard")
    add_shard(filters)
    filters.add_argument("--clusters", type=cli.input_path, required=True, metavar="FILE")
    add_output_dir(filters)
    return parser


def _run(arguments: argparse.Namespace, settings: Settings) -> None:
    from corpus.dedup.clusters import outputs_of
    from corpus.dedup.run import dedup

    shards = expand_inputs(arguments.input, "shards")
    require_regular(shards, "corpus.dedup run")
    require_distinct_stems(shards)
    outputs = [path for shard in shards for path in outputs_of(shard, arguments.output_dir)]
    check_outputs([*outputs, arguments.stats], shards)
    stats = dedup(shards, arguments.output_dir, settings.dedup, arguments.workers, settings.max_bad_share)
    stats.finish(arguments.stats)


def _signatures(arguments: argparse.Namespace, settings: Settings) -> None:
    from corpus.dedup.signatures import write_signatures

    more = (arguments.workers, settings.max_bad_share)
    count = write_signatures(arguments.input, arguments.output, settings.dedup, *more)
    print(f"dedup signatures: {count} documents")


def _filter(arguments: argparse.Namespace, _: Settings) -> None:
    from corpus.dedup.clusters import filter_shard, outputs_of

    require_regular([arguments.input], "deduplication")
    check_outputs([*outputs_of(arguments.input, arguments.output_dir), arguments.stats], [arguments.input])
    filter_shard(arguments.input, arguments.clusters, arguments.output_dir).finish(arguments.stats)


def _over_all_shards(arguments: argparse.Namespace, settings: Settings) -> None:
    """The phases that read the signatures of all shards: bands, verify, clusters."""
    from corpus.dedup.clusters import write_clusters
    from corpus.dedup.pairs import jobs_of, write_edges, write_pairs
    from corpus.dedup.signatures import Signatures

    _check_outputs(arguments)
    rules = settings.dedup
    with Signatures(_signature_files(arguments.signatures, arguments.shards), rules) as signatures:
        if arguments.phase == "bands":
            if not signatures.count:
                raise EmptyResultError(
                    f"{signatures.shards[0].path}: no documents in {len(signatures.shards)} shard(s)"
                )
            for (part, parts), output in _shares(arguments):
                count = write_pairs(signatures, output, rules, part, parts)
                print(f"dedup bands {part}/{parts}: {count} pairs of {signatures.count} documents")
        elif arguments.phase == "verify":
            for (block, blocks), output in _shares(arguments):
                pair_files = [arguments.pairs / f"{job}.pairs" for job in range(blocks)]
                candidates, edges = write_edges(signatures, pair_files, output, rules, block)
                print(f"dedup verify {block}/{blocks}: {edges} of {candidates} pairs are duplicates")
        else:
            jobs = jobs_of(arguments.pairs / "0.pairs")
            pair_files = [arguments.pairs / f"{job}.pairs" for job in range(jobs)]
            edge_files = [arguments.edges / f"{job}.edges" for job in range(jobs)]
            figures = write_clusters(signatures, pair_files, edge_files, arguments.output, rules)
            if arguments.stats:
                write_json(arguments.stats, figures)
            print(f"dedup clusters: {figures['edges']} edges between {figures['documents']} documents")


def _shares(arguments: argparse.Namespace) -> list[tuple[Share, Path]]:
    """Each share of a job, with its output."""
    return list(zip(arguments.shares, arguments.output, strict=True))


def _check_outputs(arguments: argparse.Namespace) -> None:
    folders = {name: getattr(arguments, name, None) for name in ("signatures", "pairs", "edges")}
    inputs = (path for name, folder in folders.items() if folder for path in folder.glob(f"*.{name}"))
    outputs = arguments.output if isinstance(arguments.output, list) else [arguments.output]
    check_outputs([*outputs, getattr(arguments, "stats", None)], inputs)


def _signature_files(folder: Path, shards: int | None) -> list[Path]:
    """All signatures in a folder, or those of the first shards: another run may have left more."""
    if shards is not None:
        return shard_paths(folder, shards, ".signatures")
    found = sorted(folder.glob("*.signatures"))
    if not found:
        raise InputError(f"{folder}: no *.signatures inside; run the phase `signatures` first")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if arguments.phase in ("bands", "verify") and len(arguments.shares) != len(arguments.output):
        parser.error(f"{len(arguments.output)} --output for {len(arguments.shares)} shares; give one for each")
    if arguments.phase in ("run", "signatures") and (warning := settings.dedup.low_recall()):
        warn(warning)
    phase = {"run": _run, "signatures": _signatures, "filter": _filter}.get(arguments.phase, _over_all_shards)
    phase(arguments, settings)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
