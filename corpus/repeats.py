"""Cut the lines and paragraphs that repeat over the corpus; the first copy of each stays.

    python -m corpus.repeats run --input dedup --output-dir repeats 'repeats.units=[lines]'
    python -m corpus.repeats count --input dedup/0000.jsonl.zst \\
        --output work/0000.units 'repeats.units=[lines]'
    python -m corpus.repeats sum --units work --shards 1 --output all.repeats \\
        'repeats.units=[lines]'
    python -m corpus.repeats cut --input dedup/0000.jsonl.zst --repeats all.repeats \\
        --output repeats/0000.jsonl.zst --rejects rejects/0000.jsonl.zst 'repeats.units=[lines]'

`count` hashes the lines or paragraphs of a shard, `sum` finds those that occur more than
`repeats.max_count` times in all shards, `cut` removes them from a shard; `run` does it all on one
machine. Texts of `repeats.min_bytes` or more are compared in normalised form (NFKC, case and white
space folded). Which copy is the first depends on ids and texts, never on shards. Rejects hold what
was cut from each document and how often it occurs. See docs/repeats.md.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray

from common import cli
from common.errors import InputError
from common.files import Document, document_writer, expand_inputs, shard_paths, shard_stem
from common.settings import RepeatsSettings, Settings
from common.stats import Stats
from corpus.phases import SHARD, Phase, option, run_phase
from corpus.runner import Drop, Outcome, ShardStep, StepOptions, grouped, shard_outputs, step_options
from corpus.segments import write_segments
from corpus.text.repeats import CHUNK, RANGES, UNIT, Repeats, find_units, fingerprint, write_repeats

_EXAMPLES = 10  # most frequent units, in the statistics

Removed = list[tuple[int, str]]
"""(occurrences in the corpus, text) of units that were cut."""


def hash_units(settings: RepeatsSettings, item: tuple[int, Document]) -> NDArray[Any]:
    """The units of a document, given its index in the shard: shape (units,) of UNIT."""
    index, document = item
    hashes = [unit.hash for unit in find_units(document["text"].split("\n"), settings)]
    units = np.empty(len(hashes), dtype=UNIT)
    units["hash"], units["document"] = hashes, index
    units["key"] = xxhash.xxh3_64_intdigest(f"{document['id']}\0{document['text']}".encode())
    return units


def count(shard: Path, output: Path, settings: RepeatsSettings, **options: Unpack[StepOptions]) -> None:
    """Write the units of a shard. Raises InputError for unreadable input."""
    step = ShardStep("repeats count", [shard], **options | {"allow_empty": True})
    info: dict[str, Any] = {"settings": fingerprint(settings), "units": 0}
    with (
        step.map(partial(hash_units, settings), enumerate(step.documents())) as hashed,
        step.results() as results,
        write_segments(output, info) as file,
    ):
        for chunk in grouped(hashed, lambda units: 1 + len(units), CHUNK):
            units = np.concatenate(chunk)
            first_byte = (units["hash"] >> np.uint64(56)).astype(np.int64)
            units = units[np.argsort(first_byte, kind="stable")]
            ends = np.cumsum(np.bincount(first_byte, minlength=RANGES))
            for name, part in enumerate(np.split(units, ends[:-1])):
                file.append(str(name), part)
            info["units"] += len(units)
            results.meter.advance(len(chunk))
        info["documents"] = step.stats.documents_in


_repeats_of = lru_cache(1)(Repeats)


def cut_document(
    settings: RepeatsSettings, repeats: Path, shard: str, item: tuple[int, Document]
) -> tuple[Outcome, Removed]:
    """Cut repeated units out of a document, given its index in the shard; also returns them."""
    (index, document), known = item, _repeats_of(repeats, shard)
    lines, removed, kept, cut_lines = document["text"].split("\n"), Removed(), set[int](), set[int]()
    units = find_units(lines, settings)
    first, times = known.find(np.array([unit.hash for unit in units], dtype=np.uint64))
    for number in np.flatnonzero(times).tolist():
        start, end, unit_hash = units[number]
        if settings.keep_first and first[number] == known.shard << 32 | index and unit_hash not in kept:
            kept.add(unit_hash)
        else:
            removed.append((int(times[number]), "\n".join(lines[start:end])))
            cut_lines.update(range(start, end))
    if not removed:
        return document, removed
    text = without(lines, cut_lines)
    if len(text) < max(1, settings.min_characters):
        return Drop(document, "short", f"{len(text)} of {len(document['text'])} characters left"), removed
    return {**document, "text": text}, removed


def without(lines: Sequence[str], removed: set[int]) -> str:
    """The lines without those of `removed`, and at most one blank line in place of each cut."""
    left, after_cut = list[str](), False
    for index, line in enumerate(lines):
        blank = not line.strip()
        if index not in removed and not (blank and after_cut and not (left and left[-1].strip())):
            left.append(line)
        after_cut = index in removed or (after_cut and blank)
    while after_cut and left and not left[-1].strip():
        left.pop()
    return "\n".join(left)


def cut(shard: Path, repeats: Path, output: Path, settings: RepeatsSettings, **options: Unpack[StepOptions]) -> Stats:
    """Cut the repeats out of a shard.

    Raises InputError if the shard has changed since it was counted, EmptyResultError if nothing is
    left (unless `allow_empty`).
    """
    step = ShardStep("repeats", [shard], **options, cure="relax `repeats` in the configuration")
    figures, top = {"units": 0, "characters": 0, "documents": 0}, Removed()
    of_document = partial(cut_document, settings, repeats, shard_stem(shard))
    with (
        step.map(of_document, enumerate(step.documents())) as outcomes,
        step.results(document_writer(output)) as results,
    ):
        for outcome, removed in outcomes:
            results.record(outcome)
            if removed:
                figures["units"] += len(removed)
                figures["characters"] += sum(len(text) for _, text in removed)
                figures["documents"] += 1
                examples = {*top, *((times, text[:200]) for times, text in removed)}
                top = sorted(examples, key=lambda example: (-example[0], example[1]))[:_EXAMPLES]
                if not isinstance(outcome, Drop):
                    pieces = [{"count": times, "text": text} for times, text in removed]
                    results.reject({"id": outcome["id"], "url": outcome.get("url"), "reason": "cut", "cut": pieces})
        if step.stats.documents_in != _repeats_of(repeats, shard_stem(shard)).documents:
            raise InputError(f"{shard}: has changed since it was counted; run `corpus.repeats count` again")
    step.stats.extra["cut"] = {**figures, "most_frequent": [{"count": times, "text": text} for times, text in top]}
    return step.stats


# ---------------------------------------------------------------- command line


def _options(arguments: argparse.Namespace, settings: Settings) -> StepOptions:
    return {"workers": arguments.workers, "max_bad_share": settings.max_bad_share}


def _count(arguments: argparse.Namespace, settings: Settings) -> None:
    count(arguments.input, arguments.output, _chosen(settings), **_options(arguments, settings))


def _sum(arguments: argparse.Namespace, settings: Settings) -> None:
    files = shard_paths(arguments.units, arguments.shards, ".units")
    write_repeats(files, arguments.output, _chosen(settings))


def _cut(arguments: argparse.Namespace, settings: Settings) -> None:
    options = step_options(arguments, settings)
    stats = cut(arguments.input, arguments.repeats, arguments.output, _chosen(settings), **options)
    stats.finish(arguments.stats)


def _run(arguments: argparse.Namespace, settings: Settings) -> None:
    """Run all phases over all shards; shards, rejects and statistics are in one folder."""
    rules, inputs, folder = _chosen(settings), expand_inputs(arguments.input, "shards"), arguments.output_dir
    outputs = shard_outputs(inputs, folder, "corpus.repeats run")
    options: StepOptions = {**_options(arguments, settings), "allow_empty": True}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix="work.") as work:
        units, repeats = [Path(work, f"{shard_stem(path)}.units") for path in inputs], Path(work, "all.repeats")
        for path, output in zip(inputs, units, strict=True):
            count(path, output, rules, **options)
        write_repeats(units, repeats, rules)
        for path, (output, rejects, figures) in outputs.items():
            options["rejects"] = rejects
            cut(path, repeats, output, rules, **options).finish(figures)


def _chosen(settings: Settings) -> RepeatsSettings:
    """The settings of this step. Raises InputError if no units are chosen."""
    if not settings.repeats.units:
        raise InputError("no units: give 'repeats.units=[lines]' or [paragraphs], or a --config that has them")
    return settings.repeats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    units = option("--units", type=cli.input_path, metavar="DIR", help="NNNN.units inside")
    shards = option("--shards", type=cli.positive_int, metavar="N", help="shards 0000 to N - 1")
    repeats = option("--repeats", type=cli.input_path, metavar="FILE", help="what `sum` wrote")
    output = option("--output", type=cli.output_file, metavar="FILE", help="hashes, or a shard")
    folder = option("--output-dir", type=cli.output_folder, metavar="DIR", help="shards, stats")
    workers, step = cli.add_workers, partial(cli.add_step_options, section="repeats")
    phases = (
        Phase("count", _count, "first phase: the lines or paragraphs of a shard, hashed", (SHARD, output, workers)),
        Phase("sum", _sum, "second phase: those that repeat, given those of all shards", (units, shards, output)),
        Phase("cut", _cut, "third phase: a shard without them", (SHARD, repeats, output, step)),
        Phase("run", _run, "all phases over all shards, on this machine", (cli.add_input, folder, workers)),
    )
    return run_phase("corpus.repeats", __doc__, "repeats", phases, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
