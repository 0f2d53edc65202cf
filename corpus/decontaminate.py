"""Cut out of the corpus what evaluation sets ask for: their 8- to 13-grams of words, and the text around them.

    python -m corpus.decontaminate run --files lambada.jsonl --input dedup/*.jsonl.zst --output-dir clean
    python -m corpus.decontaminate count --files lambada.jsonl --input dedup/0.jsonl.zst --output 0.json
    python -m corpus.decontaminate cut --files lambada.jsonl --input dedup/0.jsonl.zst --counts *.json --output 0.zst

Two passes: `count` how often each n-gram occurs in a shard, then `cut` each shard, given all counts; `run` is both on
one machine. N-grams seen 10 times or more in the corpus are ordinary language and stay. Around the others 200
characters on each side are cut, to the next . ! or ?; pieces over 200 characters are kept, with a blank line between
them, and a document in more than 10 pieces is dropped (Megatron-LM's recipe; Brown et al. 2020, appendix C). Words are
compared in one Unicode form, and languages without spaces by characters: see docs/corpus.md.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import (
    BadLines,
    Document,
    check_outputs,
    document_writer,
    expand_inputs,
    find_inputs,
    read_json,
    read_shards,
    reject_writer,
    require_regular,
    write_json,
)
from common.progress import Meter
from common.settings import DecontaminateSettings
from common.stats import Stats
from common.workers import Workers, batched
from corpus.text.ngrams import Ngrams, read_ngrams
from corpus.text.words import spans, words

_BATCH = 64  # documents sent to a worker at once
# . ! ? and what other scripts write for them; Thai and Lao put a space between sentences
_SENTENCE_END = re.compile(r"[.!?。．｡！？।॥؟۔։።།။។]|(?<=[\u0e00-\u0eff])\s")

Found = tuple[Document, list[int], str | None]
"""A document with what is left of its text, the n-grams cut out of it, and the reason to drop it."""


@lru_cache(1)
def ngrams_of(settings: str) -> Ngrams:
    """The n-grams of the evaluation sets of `settings` (JSON), read once a process."""
    parsed = DecontaminateSettings.model_validate_json(settings)
    return read_ngrams(expand_inputs(parsed.files, "lists"), parsed)


def count_documents(settings: str, documents: list[Document]) -> tuple[int, Counter[int]]:
    """How many documents these are, and how often each n-gram occurs in them, by its number."""
    find = ngrams_of(settings).find
    return len(documents), Counter(number for document in documents for _, number in find(words(document["text"])))


def count(
    inputs: Sequence[Path], settings: DecontaminateSettings, workers: int = 1, max_bad_share: float = 0.001
) -> dict[str, object]:
    """The first pass over some shards: the digest of the n-grams, and the occurrences of those that occur."""
    with Workers(workers) as pool:
        return count_shards(inputs, settings, pool, max_bad_share)


def count_shards(
    inputs: Sequence[Path], settings: DecontaminateSettings, pool: Workers, max_bad_share: float
) -> dict[str, object]:
    """`count` with workers that there are."""
    given, bad, total = settings.model_dump_json(), BadLines(max_bad_share), Counter[int]()
    digest = ngrams_of(given).digest
    counted = pool.map(partial(count_documents, given), batched(read_shards(inputs, bad), _BATCH))
    with Meter("decontaminate count", "documents") as meter:
        for documents, counts in counted:
            total.update(counts)
            meter.advance(documents)
    bad.check()
    return {"ngrams": digest, "counts": {str(number): times for number, times in sorted(total.items())}}


def common_ngrams(ngrams: Ngrams, counts: Iterable[Path], settings: DecontaminateSettings) -> frozenset[int]:
    """Numbers of the n-grams that occur too often in the corpus to mean anything, summed over files of counts."""
    total: Counter[int] = Counter()
    for path in counts:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("ngrams") != ngrams.digest:
            raise InputError(f"{path}: not counted with these evaluation sets; run `corpus.decontaminate count` again")
        total.update({int(number): times for number, times in found["counts"].items()})
    return frozenset(number for number, times in total.items() if times >= settings.max_count)


def pieces(text: str, places: Iterable[tuple[int, int]], settings: DecontaminateSettings) -> list[str]:
    """What is left of a text without these places (from, to) and what surrounds them; places in order."""
    left: list[str] = []
    start = 0  # of what is not decided yet
    for first, last in places:
        end = first - settings.cut_characters - 1
        while end > start and not _SENTENCE_END.match(text, end):
            end -= 1
        if end > start:
            left.append(text[start : end + 1])
        found = _SENTENCE_END.search(text, max(start - 1, last + settings.cut_characters))
        start = found.end() if found else len(text)
    left.append(text[start:])
    return [piece.strip() for piece in left if len(piece.strip()) > settings.min_characters]


def cut_documents(settings: str, ignored: frozenset[int], documents: list[Document]) -> list[Found]:
    """Each document without the n-grams of the evaluation sets."""
    ngrams, parsed = ngrams_of(settings), DecontaminateSettings.model_validate_json(settings)
    cut: list[Found] = []
    for document in documents:
        text = document["text"]
        found = [(place, number) for place, number in ngrams.find(words(text)) if number not in ignored]
        if not found:
            cut.append((document, [], None))
            continue
        where = spans(text)
        places = [(where[at][0], where[at + ngrams.texts[number].count(" ")][1]) for at, number in found]
        left = pieces(text, places, parsed)
        reason = "contaminated" if not left else "many_pieces" if len(left) > parsed.max_pieces else None
        kept = document if reason else {**document, "text": "\n\n".join(left)}
        cut.append((kept, [number for _, number in found], reason))
    return cut


def cut(
    inputs: Sequence[Path],
    counts: Sequence[Path],
    output: Path,
    settings: DecontaminateSettings,
    rejects: Path | None = None,
    workers: int = 1,
    max_bad_share: float = 0.001,
    allow_empty: bool = False,
) -> Stats:
    """The second pass: shards into one shard, in order.

    Raises InputError for unreadable input and counts of other n-grams, EmptyResultError when nothing is left.
    """
    shard = Shard(inputs, output, rejects, BadLines(max_bad_share))
    with Workers(workers) as pool:
        (stats,) = cut_shards([shard], counts, settings, pool, allow_empty)
    return stats


@dataclass
class Shard:
    """What the second pass reads and writes, and what it counts."""

    inputs: Sequence[Path]
    output: Path
    rejects: Path | None
    bad: BadLines
    stats: Stats = field(default_factory=partial(Stats, "decontaminate"))

    def documents(self) -> Iterator[Document]:
        """The documents of the inputs, counted."""
        return self.stats.counted(read_shards(self.inputs, self.bad))


def cut_shards(
    shards: Sequence[Shard], counts: Sequence[Path], settings: DecontaminateSettings, pool: Workers, allow_empty: bool
) -> Iterator[Stats]:
    """The second pass over several shards through one pool; yields the statistics of each when it is written."""
    given = settings.model_dump_json()
    ngrams = ngrams_of(given)
    ignored = common_ngrams(ngrams, counts, settings)
    batches = [batched(shard.documents(), _BATCH) for shard in shards]
    results = pool.map_groups(partial(cut_documents, given, ignored), batches)
    for shard, found in zip(shards, results, strict=True):
        _write(shard, found, ngrams, ignored, allow_empty)
        yield shard.stats


def _write(
    shard: Shard, results: Iterable[list[Found]], ngrams: Ngrams, ignored: frozenset[int], allow_empty: bool
) -> None:
    """Write a shard, all or nothing. Raises EmptyResultError when nothing is left."""
    stats, bad = shard.stats, shard.bad
    hits, touched = np.zeros(len(ngrams.texts), dtype=np.int64), Counter[str]()
    with document_writer(shard.output) as write, reject_writer(shard.rejects, "decontaminate") as reject:
        with Meter("decontaminate", "documents") as meter:
            for batch in results:
                for document, found, reason in batch:
                    np.add.at(hits, found, 1)
                    touched.update(
                        name for name, numbers in ngrams.sets.items() if found and np.isin(found, numbers).any()
                    )
                    if reason:
                        stats.drop(reason, document)
                        reject({**document, "reason": reason})
                    else:
                        stats.keep(document)
                        write(document)
                meter.advance(len(batch))
        bad.check()
        if not stats.documents_out and not allow_empty:
            raise EmptyResultError(
                f"{shard.inputs[0]}: none of {stats.documents_in} documents is left ({stats.dropped()})"
            )
    stats.extra["evaluation_sets"] = {
        name: {
            "ngrams": len(numbers),
            "ignored": len(ignored.intersection(numbers.tolist())),
            "hits": int(hits[numbers].sum()),
            "documents": touched[name],
        }
        for name, numbers in sorted(ngrams.sets.items())
    }
    stats.extra["bad_lines"] = bad.bad


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("corpus.decontaminate", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in (
        ("count", "first pass: how often the n-grams occur in a shard"),
        ("cut", "second pass: a shard without them, given all counts"),
        ("run", "both passes over all shards, on this machine"),
    ):
        one = verbs.add_parser(verb, help=summary)
        one.add_argument(
            "--input", type=cli.shards, nargs="+", required=True, metavar="FILE", help="shards of documents"
        )
        one.add_argument(
            "--files", type=cli.lists, nargs="+", metavar="FILE", help="evaluation sets (default: the configuration's)"
        )
        one.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="processes (default 1)")
        one.add_argument("--config", type=cli.input_path, metavar="FILE", help="read the section `decontaminate`")
        if verb == "run":
            one.add_argument(
                "--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="shards, counts, stats"
            )
        else:
            one.add_argument(
                "--output", type=cli.output_file, required=True, metavar="FILE", help="what the pass makes"
            )
        if verb == "cut":
            one.add_argument(
                "--counts", type=cli.any_files, nargs="+", required=True, metavar="FILE", help="counts of all shards"
            )
            one.add_argument(
                "--shards", type=cli.positive_int, metavar="N", help="--counts is a folder: its shards 0000 to N - 1"
            )
            one.add_argument(
                "--rejects", type=cli.output_file, metavar="FILE", help="dropped documents with their reasons"
            )
            one.add_argument("--stats", type=cli.output_file, metavar="FILE", help="what was counted, as JSON")
            one.add_argument("--allow-empty", action="store_true", help="a shard may end empty")
    return parser


def _counts(given: Sequence[str], shards: int | None) -> list[Path]:
    """The files of counts: as they are named, or those of the first shards of a folder, should others be left there."""
    if shards is None:
        return expand_inputs(given)
    if len(given) > 1 or not Path(given[0]).is_dir():
        raise InputError(f"--counts {given[0]}: must be one folder; --shards takes shards out of a folder")
    return [Path(given[0]) / f"{shard:04d}.counts.json" for shard in range(shards)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    settings = step_settings(arguments.config)
    section = settings.decontaminate.model_copy(update={"files": arguments.files} if arguments.files else {})
    if not section.files:
        raise InputError("no evaluation sets: name --files, or a --config with `decontaminate.files`")
    inputs, bad_share, workers = expand_inputs(arguments.input, "shards"), settings.max_bad_share, arguments.workers
    files = [path for pattern in section.files for path in find_inputs(pattern, "lists")[0]]
    if workers > 1:
        require_regular(files, "every worker")
    if arguments.verb != "run":
        check_outputs([getattr(arguments, name, None) for name in ("output", "rejects", "stats")], [*inputs, *files])
    if arguments.verb == "count":
        write_json(arguments.output, count(inputs, section, workers, bad_share))
        return 0
    if arguments.verb == "cut":
        counts = _counts(arguments.counts, arguments.shards)
        more = (arguments.rejects, workers, bad_share, arguments.allow_empty)
        cut(inputs, counts, arguments.output, section, *more).finish(arguments.stats)
        return 0
    folder: Path = arguments.output_dir
    names = [path.name.split(".jsonl")[0] for path in inputs]
    if len(set(names)) < len(names):
        raise InputError("two inputs have the same file name; rename one of them")
    require_regular(inputs, "corpus.decontaminate run")
    shards = [
        Shard([path], folder / f"{name}.jsonl.zst", folder / "rejects" / f"{name}.jsonl.zst", BadLines(bad_share))
        for path, name in zip(inputs, names, strict=True)
    ]
    written = [path for shard in shards for path in (shard.output, shard.rejects) if path is not None]
    check_outputs(written, [*inputs, *files])
    with Workers(workers) as pool:
        write_json(folder / "counts.json", count_shards(inputs, section, pool, bad_share))
        cut_stats = cut_shards(shards, [folder / "counts.json"], section, pool, allow_empty=True)
        for name, stats in zip(names, cut_stats, strict=True):
            stats.finish(folder / f"{name}.stats.json")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
