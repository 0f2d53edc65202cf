"""Repair text with ftfy; drop short documents, browser notices, and other languages.

    python -m corpus.clean --input pages.jsonl.zst --output clean.jsonl.zst --rejects dropped.jsonl
    python -m corpus.clean --input pages/*.jsonl.zst --output clean.jsonl.zst --workers 8
    python -m corpus.clean --explain pages.jsonl.zst

The first reason wins: empty, javascript, short, Gopher's quality rules (if enabled), language.
Documents keep their order, and the worker count changes no byte. --explain writes nothing: it
prints the verdict of each filter on twenty documents of a shard.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import nsmallest
from pathlib import Path
from typing import Unpack

from common import cli
from common.files import Document, document_writer, expand_inputs, read_documents
from common.settings import CleanSettings
from common.stats import Stats
from corpus.runner import Drop, Outcome, ShardStep, StepOptions, step_options
from corpus.text.filters import filters
from corpus.text.verdicts import Filter, Text, Verdict

_EXPLAINED = 20  # documents that --explain shows
_PLAIN = r"\t\n\f -%'-~–—…"  # ASCII from space to tilde without &
_CLEAN = re.compile(f"[{_PLAIN}‘’“”]*|[{_PLAIN}à-öø-ÿ]*")
_LINE = re.compile("[^\n]*\n|[^\n]+")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean_document(rules: Sequence[Filter], fold: bool, document: Document) -> tuple[Outcome, Counter[str]]:
    """Repair a document, and change or drop it by the filters; also returns the changes."""
    counts, document = Counter[str](), {**document, "text": repair(document["text"], fold)}
    text = Text(document["text"])
    for rule in rules:
        verdict = rule.judge(text)
        if isinstance(verdict, str):
            return Drop(document, rule.name, verdict), counts
        if verdict is not None and verdict.text is not None:
            text = Text(verdict.text)
            document["text"] = verdict.text
        if verdict is not None:
            counts.update(verdict.counts)
            if verdict.meta:
                document["meta"] = {**document.get("meta", {}), **verdict.meta}
    return document, counts


def clean(inputs: Sequence[Path], output: Path, settings: CleanSettings, **options: Unpack[StepOptions]) -> Stats:
    """Clean shards into one shard, in order.

    Raises InputError for unreadable input, EmptyResultError if no document is left.
    """
    step = ShardStep("clean", inputs, **options, cure="relax `clean` in the configuration")
    languages, changes = Counter[str](), Counter[str]()
    with (
        step.map(partial(clean_document, filters(settings), settings.fold_whitespace)) as outcomes,
        step.results(document_writer(output)) as results,
    ):
        for outcome, counts in outcomes:
            results.record(outcome)
            if not isinstance(outcome, Drop):
                changes.update(counts)
            elif outcome.reason == "language":
                languages[outcome.detail] += 1
    if changes:
        step.stats.extra["changes"] = dict(sorted(changes.items()))
    if settings.languages:
        kept = step.stats.kept_by.get("detected_language", {})
        languages.update({code: documents for code, (documents, _) in kept.items()})
        step.stats.extra["languages"] = dict(languages.most_common())
    return step.stats


def explain(shard: Path, settings: CleanSettings) -> Iterator[str]:
    """Lines with each filter's verdict on the twenty documents of the smallest ids (hashes)."""
    rules = filters(settings)
    width = max(len(rule.name) for rule in rules)
    for document in nsmallest(_EXPLAINED, read_documents(shard), key=lambda document: str(document["id"])):
        text = Text(repair(document["text"], settings.fold_whitespace))
        lines, verdict = [f"  {'repair':<{width}}  {len(document['text'])} -> {len(text)} characters: "], "keep"
        lines[0] += repr(" ".join(text[:60].split()))
        for rule in rules:
            judged = rule.judge(text)
            if isinstance(judged, str):
                verdict = f"drop ({rule.name})" if verdict == "keep" else verdict
            elif judged is not None and judged.text is not None:
                text = Text(judged.text)
            lines.append(f"  {rule.name:<{width}}  {_described(judged)}")
        yield f"{document['id']} {document.get('url') or ''}: {verdict}"
        yield from lines


def _described(verdict: Verdict) -> str:
    if isinstance(verdict, str):
        return f"drop: {verdict}"
    if verdict is None:
        return "keep"
    counts = [f"{count} {kind}" for kind, count in verdict.counts.items()]
    return ", ".join(["keep", *counts, *(f"{key} {value}" for key, value in verdict.meta.items())])


# ------------------------------------------------------------------------------------------- repair

# ftfy repairs line by line, and gets only the lines that it could change. The others are printable
# ASCII, dashes and …, with either curly quotes or lower-case letters of Latin-1. Its steps act on:
#
# | step | acts on |
# |---|---|
# | unescape_html | & |
# | fix_encoding | what ftfy.badness matches; among these, a quote beside an accented letter |
# | c1 controls, ligatures, width, surrogates, NFC | other characters |
# | uncurl_quotes | curly quotes; straightened here |
# | line breaks, terminal escapes, control characters | \r and controls other than \t, \n, \f |

# before ftfy, which drops backspaces: bold and underlined letters of manual pages, N\bN and _\bN
_UNDERLINED = re.compile("([^\n\b])\b_(?!\b)")
_OVERSTRUCK = re.compile("(?:[^\n\b]\b)+(?=[^\n])")
# after ftfy, which may unescape them: soft hyphen, word joiner, and zero-width space (which
# separates words in Thai, Lao, Burmese and Khmer). U+200C and U+200D stay: they change letters and
# emoji
_BETWEEN_WORDS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_INVISIBLE = re.compile(f"[\u00ad\u2060]|(?<![{_BETWEEN_WORDS}])\u200b(?![{_BETWEEN_WORDS}])")


def repair(text: str, fold: bool = False) -> str:
    """Fix mojibake, entities, quotes; remove NUL, overstriking, invisible characters in words.

    `fold` calls fold_spaces, too.
    """
    if "\b" in text:
        text = _OVERSTRUCK.sub("", _UNDERLINED.sub(r"\1", text))
    fixed = fix_text(text.replace("\x00", ""))
    if not fixed.isascii():
        fixed = _INVISIBLE.sub("", fixed)
    return fold_spaces(fixed) if fold else fixed


def fold_spaces(text: str) -> str:
    """Fold white space to one space or at most one blank line; strip both ends."""
    text = _SPACES.sub(" ", text).replace(" \n", "\n").replace("\n ", "\n")
    return _BLANK_LINES.sub("\n\n", text).strip()


def fix_text(text: str) -> str:
    """The result of `ftfy.fix_text`, ten times faster for English text."""
    if _CLEAN.fullmatch(text):
        return _straight(text)
    import ftfy

    fixed = []
    entities: str | bool = "auto"
    for line in _LINE.findall(text):
        simple = _CLEAN.fullmatch(line)
        fixed.append(_straight(line) if simple else ftfy.fix_text(line, unescape_html=entities))
        if "<" in line:
            entities = False  # like ftfy, take the rest of the text for HTML
    return "".join(fixed)


def _straight(text: str) -> str:
    return text.replace("‘", "'").replace("’", "'").replace("“", '"').replace("”", '"')


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.clean", __doc__)
    cli.add_input(parser, required=False)
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="shard of clean documents")
    parser.add_argument("--explain", type=cli.input_path, metavar="FILE", help="show filter verdicts on 20 documents")
    cli.add_step_options(parser, "clean")
    arguments = parser.parse_args(argv)
    if (arguments.input is None or arguments.output is None) == (arguments.explain is None):
        parser.error("--input and --output, or --explain alone")
    settings = cli.read_settings(arguments)
    if arguments.explain:
        for line in explain(arguments.explain, settings.clean):
            print(line)
        return 0
    inputs, options = expand_inputs(arguments.input, "shards"), step_options(arguments, settings)
    clean(inputs, arguments.output, settings.clean, **options).finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
