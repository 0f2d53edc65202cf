"""Repair text with ftfy and drop the documents that are too short, browser notices, or in another language.

    python -m corpus.clean --input pages.jsonl.zst --output clean.jsonl.zst --rejects dropped.jsonl.zst
    python -m corpus.clean --input pages/*.jsonl.zst --output clean.jsonl.zst --workers 8 --config config.yaml
    python -m corpus.clean --explain pages.jsonl.zst

The first reason wins: empty, javascript, short, Gopher's quality rules where the configuration wants them, language.
Documents keep their order; the worker count changes no byte. --explain writes nothing: it prints what each rule finds
in twenty documents of a shard.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import nsmallest
from pathlib import Path

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError
from common.files import (
    BadLines,
    Document,
    document_writer,
    expand_inputs,
    read_documents,
    read_shards,
    reject_writer,
)
from common.progress import Meter
from common.settings import CleanSettings
from common.stats import Stats
from common.workers import batched, process_map
from corpus.text.filters import filters
from corpus.text.repair import repair

_BATCH = 32  # documents sent to a worker at once: some tens of milliseconds of work
_EXPLAINED = 20  # documents that --explain shows

Verdict = tuple[str, str] | None
"""Name of the first rule that drops a document and what it found, or None."""


def clean_documents(settings: CleanSettings, documents: list[Document]) -> list[tuple[Document, Verdict]]:
    """Each document with its repaired text, and why it is dropped."""
    rules = filters(settings)
    cleaned: list[tuple[Document, Verdict]] = []
    for document in documents:
        text = repair(document["text"])
        findings = ((rule.name, rule.finding(text)) for rule in rules)
        verdict = next(((name, finding) for name, finding in findings if finding is not None), None)
        cleaned.append(({**document, "text": text}, verdict))
    return cleaned


def clean(
    inputs: Sequence[Path],
    output: Path,
    settings: CleanSettings,
    rejects: Path | None = None,
    workers: int = 1,
    max_bad_share: float = 0.001,
    allow_empty: bool = False,
) -> Stats:
    """Clean shards into one shard, in order.

    Raises InputError for unreadable input, EmptyResultError when nothing is left (unless `allow_empty`).
    """
    stats, bad, languages = Stats("clean"), BadLines(max_bad_share), Counter[str]()
    documents = stats.counted(read_shards(inputs, bad))
    with (
        process_map(partial(clean_documents, settings), batched(documents, _BATCH), workers) as results,
        document_writer(output) as write,
        reject_writer(rejects, "clean") as reject,
        Meter("clean", "documents") as meter,
    ):
        for batch in results:
            for document, verdict in batch:
                if verdict:
                    reason, finding = verdict
                    rejected = {**document, "reason": reason, "finding": finding}
                    stats.drop(reason, rejected)
                    reject(rejected)
                    languages.update([finding] if reason == "language" else [])
                else:
                    stats.keep(document)
                    write(document)
            meter.advance(len(batch))
        bad.check()
        if not stats.documents_out and not allow_empty:
            raise EmptyResultError(
                f"{', '.join(map(str, inputs))}: none of {stats.documents_in} documents is left after cleaning "
                f"({stats.dropped()}); see the section `clean` of the configuration"
            )
    if settings.language:  # asked last: what is kept has it
        languages[settings.language] = stats.documents_out
        stats.extra["languages"] = dict(languages.most_common())
    stats.extra["bad_lines"] = bad.bad
    return stats


def explain(shard: Path, settings: CleanSettings) -> Iterator[str]:
    """Lines that say what each rule finds in some documents of a shard: those with the smallest ids, being hashes."""
    rules = filters(settings)
    width = max(len(rule.name) for rule in rules)
    for document in nsmallest(_EXPLAINED, read_documents(shard), key=lambda document: str(document["id"])):
        text = repair(document["text"])
        findings = [(rule.name, rule.finding(text)) for rule in rules]
        verdict = next((f"drop ({name})" for name, finding in findings if finding is not None), "keep")
        yield f"{document['id']} {document.get('url') or ''}: {verdict}"
        start = " ".join(text[:60].split())
        yield f"  {'repair':<{width}}  {len(document['text'])} -> {len(text)} characters: {start!r}"
        yield from (f"  {name:<{width}}  {'keep' if found is None else 'drop: ' + found}" for name, found in findings)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.clean", __doc__)
    parser.add_argument("--input", type=cli.shards, nargs="+", metavar="FILE", help="shards of documents")
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="shard of clean documents")
    parser.add_argument(
        "--explain", type=cli.input_path, metavar="FILE", help="print what each rule finds in some documents"
    )
    cli.add_step_options(parser, "clean")
    arguments = parser.parse_args(argv)
    if (arguments.input is None or arguments.output is None) == (arguments.explain is None):
        parser.error("--input and --output, or --explain alone")
    settings = step_settings(arguments.config)
    if arguments.explain:
        for line in explain(arguments.explain, settings.clean):
            print(line)
        return 0
    stats = clean(
        expand_inputs(arguments.input, "shards"),
        arguments.output,
        settings.clean,
        rejects=arguments.rejects,
        workers=arguments.workers,
        allow_empty=arguments.allow_empty,
        max_bad_share=settings.max_bad_share,
    )
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
