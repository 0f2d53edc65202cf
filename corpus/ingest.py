"""Bring existing text into the corpus: documents without a scrape.

    python -m corpus.ingest --input dump.jsonl.gz --text-key content --output documents.jsonl.zst
    python -m corpus.ingest --input texts/ wiki/AA --output-dir ingest --shards 64 --stats ingest/stats.json
    python -m corpus.ingest --config config.yaml --output-dir ingest --shards 64

Inputs are files, folders or globs, plain or .gz/.bz2/.xz/.zst; without --input they are the `sources` of the
configuration. Formats, told by the file's name where none is given:

    text            *.txt                one document a file, UTF-8
    wikiextractor   wiki_00              <doc id url title> … </doc>, or that program's JSON lines
    jsonl           all others           one JSON object a line, its text under --text-key; url, title and id are kept

A document's id is made of its canonical URL, or of its text where it has none, and its shard is a function of its id.
A shard keeps the order of the input. An id that the source had becomes `source_id`.
"""

import html
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, EncodingError, InputError
from common.files import (
    BadLines,
    Document,
    check_outputs,
    expand_inputs,
    find_inputs,
    read_lines,
    require_kept,
    sharded_writer,
    short_hash,
)
from common.files import read_text as file_text
from common.progress import Meter
from common.settings import SourceSettings
from common.stats import Stats
from corpus.urls.url import document_id

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_WIKI_FILE = re.compile(r"wiki_\d+")
# titles may have quotes in them; some versions add a revision
_WIKI_HEAD = re.compile(rb'<doc id="([^"]*)"(?: revid="[^"]*")? url="([^"]*)" title="(.*)">')


def read_text(path: Path, text_key: str, bad: BadLines) -> Iterator[Document]:
    """The one document of a text file."""
    bad.lines += 1
    try:
        yield {"text": file_text(path)}
    except EncodingError as error:
        bad.add(str(error))


def read_jsonl(path: Path, text_key: str, bad: BadLines) -> Iterator[Document]:
    """The objects of a file of JSON lines; blank lines are none."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield from _object(line, f"{path}:{number}", text_key, bad)


def _object(line: bytes, where: str, text_key: str, bad: BadLines) -> Iterator[Document]:
    bad.lines += 1
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        bad.add(f"{where}: not JSON ({error})")
        return
    if not isinstance(found, dict):
        bad.add(f"{where}: not a JSON object")
        return
    require_kept(found, where)
    if not isinstance(found.get(text_key), str):
        bad.add(f"{where}: no string under {text_key!r}")
    else:
        named = {"source_id": found.get("id"), "url": found.get("url"), "title": found.get("title")}
        yield {"text": found[text_key], **{key: str(value) for key, value in named.items() if value is not None}}


def read_wikiextractor(path: Path, text_key: str, bad: BadLines) -> Iterator[Document]:
    """The articles of a file that WikiExtractor wrote, in either of its forms; the title's line is no text."""
    head: tuple[str, Document] | None = None
    lines: list[bytes] = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        if head is None and line.startswith(b"{"):
            yield from _object(line, where, text_key, bad)
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


_READERS: dict[str, Callable[[Path, str, BadLines], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "wikiextractor": read_wikiextractor,
}


def format_of(path: Path) -> str:
    """The format that a file's name tells."""
    name = path.stem if path.suffix in _COMPRESSED else path.name
    if _WIKI_FILE.fullmatch(name):
        return "wikiextractor"
    return "text" if name.endswith(".txt") else "jsonl"


def read_source(source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The documents of a source, with their ids, in the order of its files' names.

    Raises InputError for a source that is not there and for a damaged file.
    """
    for path in expand_inputs([source.path], "lists"):
        read = _READERS[source.format or format_of(path)]
        for document in read(path, source.text_key, bad):
            yield {"id": _id(document), **document}


def _id(document: Document) -> str:
    try:
        return document_id(document["url"])
    except (KeyError, ValueError):  # no URL, or none that can be read
        return short_hash(document["text"])


def ingest(sources: Sequence[SourceSettings], outputs: Sequence[Path], max_bad_share: float = 0.001) -> Stats:
    """Write the documents of all sources into shards, all of them or none; memory is bounded whatever their number.

    Raises InputError for unreadable input, EmptyResultError where there is no document.
    """
    stats, bad = Stats("ingest"), BadLines(max_bad_share)
    documents = stats.counted(document for source in sources for document in read_source(source, bad))
    with sharded_writer(outputs) as write, Meter("ingest", "documents") as meter:
        for document in documents:
            if document["text"].strip():
                stats.keep(document)
                write(int(document["id"], 16) % len(outputs), document)
            else:
                stats.drop("empty", document)
            meter.advance(1)
        bad.check()
        if not stats.documents_out:
            names = ", ".join(source.path for source in sources)
            raise EmptyResultError(f"{names}: no document with text ({stats.dropped()})")
    stats.extra["bad_lines"] = bad.bad
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.ingest", __doc__)
    parser.add_argument("--input", type=cli.lists, nargs="+", metavar="PATH", help="files, folders or globs")
    parser.add_argument("--format", choices=list(_READERS), help="of all of them (default: by their names)")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="where JSON objects have their text (text)")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=cli.output_file, metavar="FILE", help="shard of documents")
    output.add_argument(
        "--output-dir", type=cli.output_folder, metavar="DIR", help="folder for 0000.jsonl.zst, 0001.jsonl.zst, …"
    )
    parser.add_argument("--shards", type=cli.positive_int, metavar="N", help="number of shards in --output-dir")
    parser.add_argument("--stats", type=cli.output_file, metavar="FILE", help="what was counted, as JSON")
    parser.add_argument("--config", type=cli.input_path, metavar="FILE", help="read the key `sources`")
    arguments = parser.parse_args(argv)
    if (arguments.output_dir is None) != (arguments.shards is None):
        parser.error("--output-dir and --shards belong together")
    settings = step_settings(arguments.config)
    sources = settings.sources
    if arguments.input:
        sources = [
            SourceSettings(path=path, format=arguments.format, text_key=arguments.text_key) for path in arguments.input
        ]
    if not sources:
        raise InputError("nothing to ingest: name --input, or a --config with `sources`")
    outputs = (
        [arguments.output]
        if arguments.output
        else [arguments.output_dir / f"{shard:04d}.jsonl.zst" for shard in range(arguments.shards)]
    )
    check_outputs([*outputs, arguments.stats], (path for one in sources for path in find_inputs(one.path, "lists")[0]))
    ingest(sources, outputs, max_bad_share=settings.max_bad_share).finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
