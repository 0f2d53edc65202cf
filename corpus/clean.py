"""Repair text with ftfy and drop the documents that are too short, browser notices, or in another language.

    python -m corpus.clean --input pages.jsonl.zst --output clean.jsonl.zst --rejects dropped.jsonl.zst
    python -m corpus.clean --input pages/*.jsonl.zst --output clean.jsonl.zst --workers 8 --config config.yaml

The first reason wins: empty, javascript, short, language. Documents keep their order; the worker count changes no
byte.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError
from common.files import BadLines, Document, document_writer, expand_inputs, optional_writer, read_shards
from common.progress import Meter
from common.settings import CleanSettings
from common.stats import Stats
from common.workers import batched, ordered_map

_BATCH = 32  # documents sent to a worker at once: a few hundred milliseconds of work
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")


def repair(text: str) -> str:
    """ftfy's repair (mojibake, entities, quotes), then one space between words and at most one blank line."""
    import ftfy

    text = ftfy.fix_text(text.replace("\x00", ""))
    text = _SPACES.sub(" ", text).replace(" \n", "\n").replace("\n ", "\n")
    return _BLANK_LINES.sub("\n\n", text).strip()


def language_of(text: str) -> str:
    """ISO 639-1 code by langdetect, seeded so that equal texts get equal answers; "" where it finds no letters."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return ""


@dataclass(frozen=True)
class Filter:
    """A named reason to drop a document; `drops` sees the repaired text."""

    name: str
    drops: Callable[[str], bool]


def filters(settings: CleanSettings) -> tuple[Filter, ...]:
    """OpenWebText's rules in their order; the costly one last."""
    return (
        Filter("empty", lambda text: not text),
        Filter("javascript", lambda text: len(text) < settings.javascript_characters and "javascript" in text.lower()),
        Filter("short", lambda text: len(text) < settings.min_characters),
        Filter("language", lambda text: bool(settings.language) and language_of(text) != settings.language),
    )


def clean_documents(settings: CleanSettings, documents: list[Document]) -> list[tuple[Document, str | None]]:
    """Each document with its repaired text, and the first reason to drop it or None."""
    rules = filters(settings)
    cleaned: list[tuple[Document, str | None]] = []
    for document in documents:
        text = repair(document["text"])
        reason = next((rule.name for rule in rules if rule.drops(text)), None)
        cleaned.append(({**document, "text": text}, reason))
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
    stats, bad = Stats("clean"), BadLines(max_bad_share)
    documents = stats.counted(read_shards(inputs, bad))
    results = ordered_map(partial(clean_documents, settings), batched(documents, _BATCH), workers)
    with document_writer(output) as write, optional_writer(rejects) as reject, Meter("clean", "documents") as meter:
        for batch in results:
            for document, reason in batch:
                if reason:
                    stats.reasons[reason] += 1
                    reject({**document, "reason": reason})
                else:
                    stats.keep(len(document["text"].encode()))
                    write(document)
            meter.advance(len(batch))
        bad.check()
        if not stats.documents_out and not allow_empty:
            raise EmptyResultError(
                f"{', '.join(map(str, inputs))}: none of {stats.documents_in} documents is left after cleaning "
                f"({stats.dropped()}); see the section `clean` of the configuration"
            )
    stats.extra["bad_lines"] = bad.bad
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.clean", __doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="shards of documents")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="shard of clean documents")
    cli.add_step_options(parser, "clean")
    arguments = parser.parse_args(argv)
    settings = step_settings(arguments.config)
    stats = clean(
        expand_inputs(arguments.input),
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
