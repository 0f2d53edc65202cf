"""Cut the text of evaluation sets out of the corpus: their n-grams and the text around them.

    python -m corpus.decontaminate run --files set.jsonl --input dedup --output-dir clean
    python -m corpus.decontaminate count --files set.jsonl --input dedup/0.jsonl.zst --output 0.json
    python -m corpus.decontaminate cut --files set.jsonl --input dedup/0.jsonl.zst \\
        --counts *.json --output 0.zst

`count` counts the 8- to 13-grams of words in a shard, then `cut` cuts a shard, given the counts of
all shards or their sum, which `sum` makes of thousands of files once; `run` does it all on one
machine. N-grams that occur 10 times or more in the corpus are ordinary language and stay. Around
the others 200 characters on each side are cut, up to the next . ! or ?; pieces over 200 characters
are kept, separated by blank lines, and a document in more than 10 pieces is dropped (Megatron-LM's
recipe; Brown et al. 2020, appendix C). Words are compared in one Unicode form, and languages
without spaces by characters: see docs/corpus.md.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from common import cli
from common.errors import InputError
from common.files import (
    Document,
    check_outputs,
    document_writer,
    expand_inputs,
    find_inputs,
    require_regular,
    shard_paths,
    write_json,
)
from common.settings import DecontaminateSettings, Settings
from common.stats import Stats
from corpus.phases import Phase, option, run_phase
from corpus.runner import Drop, Outcome, ShardStep, StepOptions, shard_outputs, step_options
from corpus.text.ngrams import find_matches, ngrams_of, pieces, sum_counts
from corpus.text.words import words


def find_numbers(settings: DecontaminateSettings, document: Document) -> list[int]:
    """The numbers of the n-grams in a document, with repetitions."""
    return [number for _, number in ngrams_of(settings).find(words(document["text"]))]


def count(inputs: Sequence[Path], settings: DecontaminateSettings, **options: Unpack[StepOptions]) -> dict[str, object]:
    """The first pass over some shards: the digest of the n-grams, and the count of each."""
    total, digest = Counter[int](), ngrams_of(settings).digest
    step = ShardStep("decontaminate count", inputs, **options | {"allow_empty": True})
    with step.map(partial(find_numbers, settings)) as documents, step.results() as results:
        for numbers in documents:
            total.update(numbers)
            results.meter.advance()
    return _counts_file(digest, total)


def _counts_file(digest: str, total: Counter[int]) -> dict[str, object]:
    return {"ngrams": digest, "counts": {str(number): times for number, times in sorted(total.items())}}


def cut_document(
    settings: DecontaminateSettings, ignored: frozenset[int], document: Document
) -> tuple[Outcome, list[int]]:
    """Cut the n-grams of the evaluation sets out of a document; also returns their numbers."""
    matches = find_matches(document["text"], ngrams_of(settings), ignored)
    if not matches:
        return document, []
    numbers = [number for number, _ in matches]
    left = pieces(document["text"], [span for _, span in matches], settings)
    if not left or len(left) > settings.max_pieces:
        return Drop(document, "many_pieces" if left else "contaminated"), numbers
    return {**document, "text": "\n\n".join(left)}, numbers


def cut(
    inputs: Sequence[Path],
    counts: Sequence[Path],
    output: Path,
    settings: DecontaminateSettings,
    **options: Unpack[StepOptions],
) -> Stats:
    """The second pass: shards into one shard, in order.

    Raises InputError for unreadable input and counts of other n-grams, EmptyResultError if nothing
    is left.
    """
    ngrams = ngrams_of(settings)
    _, total = sum_counts(counts, ngrams.digest)
    ignored = frozenset(number for number, times in total.items() if times >= settings.max_count)  # ordinary language
    hits, touched = np.zeros(len(ngrams.texts), dtype=np.int64), Counter[str]()
    step = ShardStep("decontaminate", inputs, **options)
    with (
        step.map(partial(cut_document, settings, ignored)) as outcomes,
        step.results(document_writer(output)) as results,
    ):
        for outcome, numbers in outcomes:
            results.record(outcome)
            if numbers:
                np.add.at(hits, numbers, 1)
                touched.update(name for name, members in ngrams.sets.items() if np.isin(numbers, members).any())
    step.stats.extra["evaluation_sets"] = {
        name: {
            "ngrams": len(members),
            "ignored": len(ignored.intersection(members.tolist())),
            "hits": int(hits[members].sum()),
            "documents": touched[name],
        }
        for name, members in sorted(ngrams.sets.items())
    }
    return step.stats


# ---------------------------------------------------------------- command line


def _prepared(arguments: argparse.Namespace, settings: Settings) -> tuple[Settings, list[Path], list[Path]]:
    """The settings with `--files`, the shards, and the evaluation sets; checks the paths."""
    if arguments.files:
        section = settings.decontaminate.model_copy(update={"files": arguments.files})
        settings = settings.model_copy(update={"decontaminate": section})
    if not settings.decontaminate.files:
        raise InputError("no evaluation sets: name --files, or a --config with `decontaminate.files`")
    inputs = expand_inputs(arguments.input, "shards")
    files = [path for pattern in settings.decontaminate.files for path in find_inputs(pattern, "lists")[0]]
    if arguments.workers > 1:
        require_regular(files, "every worker")
    check_outputs([getattr(arguments, name, None) for name in ("output", "rejects", "stats")], [*inputs, *files])
    return settings, inputs, files


def _count(arguments: argparse.Namespace, settings: Settings) -> None:
    settings, inputs, _ = _prepared(arguments, settings)
    options: StepOptions = {"workers": arguments.workers, "max_bad_share": settings.max_bad_share}
    write_json(arguments.output, count(inputs, settings.decontaminate, **options))


def _sum(arguments: argparse.Namespace, _: Settings) -> None:
    counts = shard_paths(arguments.counts, arguments.shards, ".counts.json")
    write_json(arguments.output, _counts_file(*sum_counts(counts)))


def _cut(arguments: argparse.Namespace, settings: Settings) -> None:
    settings, inputs, _ = _prepared(arguments, settings)
    counts, options = expand_inputs(arguments.counts), step_options(arguments, settings)
    cut(inputs, counts, arguments.output, settings.decontaminate, **options).finish(arguments.stats)


def _run(arguments: argparse.Namespace, settings: Settings) -> None:
    """Run both passes over all shards; all results are in one folder."""
    settings, inputs, files = _prepared(arguments, settings)
    outputs = shard_outputs(inputs, arguments.output_dir, "corpus.decontaminate run", files)
    options: StepOptions = {
        "workers": arguments.workers,
        "max_bad_share": settings.max_bad_share,
        "allow_empty": True,
    }
    counts = arguments.output_dir / "counts.json"
    write_json(counts, count(inputs, settings.decontaminate, **options))
    for path, (output, rejects, figures) in outputs.items():
        options["rejects"] = rejects
        cut([path], [counts], output, settings.decontaminate, **options).finish(figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    files = option("--files", type=cli.lists, nargs="+", required=False, metavar="FILE", help="evaluation sets")
    of_shards = option("--counts", type=cli.input_path, metavar="DIR", help="NNNN.counts.json inside")
    shards = option("--shards", type=cli.positive_int, metavar="N", help="shards 0000 to N - 1")
    counts = option("--counts", type=cli.any_files, nargs="+", metavar="FILE", help="all counts")
    output = option("--output", type=cli.output_file, metavar="FILE", help="counts, or a shard")
    folder = option("--output-dir", type=cli.output_folder, metavar="DIR", help="all results")
    shard, workers, step = cli.add_input, cli.add_workers, partial(cli.add_step_options, section="decontaminate")
    phases = (
        Phase("count", _count, "first pass: how often the n-grams occur in a shard", (shard, files, workers, output)),
        Phase("sum", _sum, "between the passes: one file of counts for all shards", (of_shards, shards, output)),
        Phase("cut", _cut, "second pass: a shard without them, given all counts", (shard, files, counts, output, step)),
        Phase("run", _run, "both passes over all shards, on this machine", (shard, files, workers, folder)),
    )
    return run_phase("corpus.decontaminate", __doc__, "decontaminate", phases, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
