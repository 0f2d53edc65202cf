"""Turn existing text into documents of the corpus, without a scrape.

    python -m corpus.ingest --input dump.jsonl.gz --text-key content --output documents.jsonl.zst
    python -m corpus.ingest --input texts/ wiki/AA --output-dir ingest --shards 64 --stats ingest/stats.json
    python -m corpus.ingest --config config.yaml --output-dir ingest --shards 64

Inputs are files, folders or globs, plain or .gz/.bz2/.xz/.zst; without --input they are the `sources` of the
configuration. Formats, by the file's name unless one is given:

    text            *.txt                one document per file, UTF-8
    wikiextractor   wiki_00              <doc id url title> … </doc>, or that program's JSON lines
    jsonl           all others           one JSON object per line, its text under --text-key

A document's id is a hash of its canonical URL, or of its text if it has no URL; its shard is a function of its id.
Shards keep the order of the input, and the worker count changes no byte. Of JSON objects, url and title are kept, id
becomes `source_id`, and all other keys (date, license, language, …) go under `meta`, 65,536 bytes per document at most.
"""

import html
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import orjson

from common import cli
from common.errors import EncodingError, InputError
from common.files import (
    LONGEST_LINE,
    BadLines,
    Document,
    check_outputs,
    expand_inputs,
    find_inputs,
    read_json,
    read_json_lines,
    read_lines,
    read_object,
    sharded_writer,
    short_hash,
)
from common.files import read_text as file_text
from common.settings import SourceSettings
from common.stats import Stats
from corpus.runner import Drop, Outcome, Step, StepOptions, step_options
from corpus.urls.url import document_id

MAX_META = 65_536
"""Bytes of JSON in a document's further keys; a document with more is a bad line."""
_OWN = ("id", "url", "title")  # keys of JSON objects that have their place in a document
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_WIKI_FILE = re.compile(r"wiki_\d+")
# titles may contain quotes; some versions add a revision
_WIKI_HEAD = re.compile(rb'<doc id="([^"]*)"(?: revid="[^"]*")? url="([^"]*)" title="(.*)">')


def read_text(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The one document of a text file."""
    bad.lines += 1
    try:
        yield {"text": file_text(path, LONGEST_LINE)}
    except EncodingError as error:
        bad.add(str(error))


def read_jsonl(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The objects of a file of JSON lines; blank lines are skipped."""
    for number, line in enumerate(read_json_lines(path), start=1):
        if line.strip():
            yield from _object(line, f"{path}:{number}", source, bad)


def _object(line: bytes, where: str, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    bad.lines += 1
    found = read_object(line, where, [source.text_key], source.skip_keys)
    if isinstance(found, str):
        bad.add(f"{where}: {found}")
        return
    further = {key: value for key, value in found.items() if key not in (*_OWN, source.text_key)}
    if (size := _size(further)) > MAX_META:
        largest = max(further, key=lambda key: _size(further[key]))
        bad.add(f"{where}: {size:,} bytes in further keys, more than {MAX_META:,}; name {largest!r} under skip_keys")
        return
    named = {"source_id": found.get("id"), "url": found.get("url"), "title": found.get("title")}
    document = {
        "text": found[source.text_key],
        **{key: str(value) for key, value in named.items() if value is not None},
    }
    meta = further.pop("meta") if isinstance(further.get("meta"), dict) else {}
    yield {**document, "meta": meta | further} if meta or further else document


def _size(value: object) -> int:
    return len(orjson.dumps(value)) if value else 0


def read_wikiextractor(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The articles of a WikiExtractor file in either of its formats, without the line that repeats the title."""
    head: tuple[str, Document] | None = None
    lines: list[bytes] = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        if head is None and line.startswith(b"{"):
            yield from _object(line, where, source, bad)
        elif line.startswith(b"<doc "):
            bad.lines += 1
            if head is not None:
                bad.add(f"{head[0]}: <doc> without </doc>")
            match = _WIKI_HEAD.match(line)
            if match is None:
                bad.add(f"{where}: not the first line of a WikiExtractor article")
            fields = [html.unescape(field.decode("utf-8", "replace")) for field in match.groups()] if match else []
            head = (where, dict(zip(("source_id", "url", "title"), fields, strict=True))) if match else None
            lines.clear()
        elif head is not None and line.strip() == b"</doc>":
            try:
                text = b"\n".join(lines).decode()
                yield {**head[1], "text": text.strip().removeprefix(head[1]["title"] + "\n").strip()}
            except UnicodeDecodeError:
                bad.add(f"{head[0]}: not UTF-8")
            head = None
        elif head is not None:
            lines.append(line)
        elif line.strip():
            bad.lines += 1
            bad.add(f"{where}: text outside of <doc> … </doc>")
    if head is not None:
        bad.add(f"{head[0]}: <doc> without </doc>")


_READERS: dict[str, Callable[[Path, SourceSettings, BadLines], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "wikiextractor": read_wikiextractor,
}


def format_of(path: Path) -> str:
    """The format that a file's name stands for."""
    name = path.stem if path.suffix in _COMPRESSED else path.name
    if _WIKI_FILE.fullmatch(name):
        return "wikiextractor"
    return "text" if name.endswith(".txt") else "jsonl"


def read_sources(sources: Sequence[SourceSettings], step: Step, known: Iterable[Path] = ()) -> Iterator[Document]:
    """The documents of the sources, still without ids; files in the order of their names.

    Files that are inputs in some `known` statistics are left out. Raises InputError for a source that does not exist,
    for a damaged file, and for a known file that has changed.
    """
    read = [read_json(path)["inputs"].items() for path in known]
    earlier = {os.path.abspath(name): found for files in read for name, found in files}
    for source in sources:
        for path in step.noted(expand_inputs([source.path], "lists"), earlier):
            for document in _READERS[source.format or format_of(path)](path, source, step.bad):
                if source.name:
                    document["meta"] = {"source": source.name, **document.get("meta", {})}
                yield document


def identify(document: Document) -> Outcome:
    """The document with its id, dropped if it has no text."""
    try:
        name = document_id(document["url"])
    except (KeyError, ValueError):  # no URL, or one that cannot be parsed
        name = short_hash(document["text"])
    identified = {"id": name, **document}
    return identified if document["text"].strip() else Drop(identified, "empty")


@contextmanager
def shards_by_id(outputs: Sequence[Path], workers: int = 1) -> Iterator[Callable[[Document], None]]:
    """Yield a function that writes a document to the shard that its id names; see `sharded_writer`."""
    with sharded_writer(outputs, workers) as write:
        yield lambda document: write(int(document["id"], 16) % len(outputs), document)


def ingest(
    sources: Sequence[SourceSettings],
    outputs: Sequence[Path],
    known: Sequence[Path] = (),
    **options: Unpack[StepOptions],
) -> Stats:
    """Write the documents of all sources into shards, all of them or none; memory is bounded, whatever their number.

    Workers are threads that compress: sending a document to a process takes longer than reading it. Raises InputError
    for unreadable input, EmptyResultError if no document has text.
    """
    threads = options.pop("workers", 1)
    step = Step("ingest", [source.path for source in sources], **options)
    return step.run(identify, shards_by_id(outputs, threads), step.stats.counted(read_sources(sources, step, known)))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.ingest", __doc__)
    cli.add_input(parser, cli.lists, required=False)
    parser.add_argument("--format", choices=list(_READERS), help="of all inputs (default: by their names)")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of JSON objects with the text (text)")
    parser.add_argument("--skip-keys", nargs="+", default=[], metavar="KEY", help="keys of JSON objects to leave out")
    parser.add_argument("--name", default="", metavar="NAME", help="the `meta.source` of documents that have none")
    cli.add_known(parser, "statistics of earlier runs of this step, whose inputs are left out")
    cli.add_output_shards(parser, "shard of documents", ".jsonl.zst")
    cli.add_step_options(parser, "sources")
    arguments = parser.parse_args(argv)
    outputs = cli.output_shards(arguments, ".jsonl.zst")
    settings = cli.read_settings(arguments)
    options = {key: getattr(arguments, key) for key in ("format", "text_key", "skip_keys", "name")}
    sources = [SourceSettings(path=path, **options) for path in arguments.input or ()] or settings.sources
    if not sources:
        raise InputError("nothing to ingest: name --input, or a --config with `sources`")
    inputs = (path for source in sources for path in find_inputs(source.path, "lists")[0])
    check_outputs([*outputs, arguments.rejects, arguments.stats], inputs)
    ingest(sources, outputs, arguments.known, **step_options(arguments, settings)).finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
