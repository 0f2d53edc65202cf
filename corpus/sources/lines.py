"""Readers of text: whole files, JSON lines, WikiExtractor's output, CSV."""

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import orjson

from common.errors import EncodingError, InputError
from common.files import (
    LONGEST_LINE,
    BadLines,
    Document,
    read_blocks,
    read_json_lines,
    read_lines,
    read_object,
)
from common.files import read_text as file_text
from common.settings import SourceSettings, closest
from corpus.runner import Drop, Outcome

# titles may contain quotes; some versions add a revision
_WIKI_HEAD = re.compile(
    rb'<doc id="(?P<source_id>[^"]*)"(?: revid="[^"]*")? url="(?P<url>[^"]*)" title="(?P<title>.*)">'
)

_MAX_META = 65_536  # bytes of JSON in a document's further keys; a document with more is a bad line
_NAMED = 20  # keys that an error names
JUDGED = 10  # lines of a file of JSON lines
"""If so many at its beginning are bad, the file is refused."""
_OWN = ("id", "url", "title")  # keys of JSON objects with a field of their own in a document


def read_text(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Outcome]:
    """The document of a text file, or a drop: `encoding`, `long`, `binary`. `bad` counts files."""
    bad.lines += 1
    try:
        yield {"text": file_text(path, LONGEST_LINE, source.encoding), "origin": f"{path}:1"}
    except EncodingError as error:
        problem = str(error).removeprefix(f"{path}: ").partition(";")[0]
        reason = {"not": "encoding", "longer": "long"}.get(problem.split()[0], "binary")
        bad.add(f"{path}: {problem}")
        yield Drop({"origin": str(path)}, reason, problem)


def read_jsonl(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The objects of a file of JSON lines; blank lines are skipped.

    Raises InputError if its first lines are all bad, so that a wrong `text_key` costs no hours.
    """
    tried = good = 0
    for number, line in enumerate(read_json_lines(path, source.encoding), start=1):
        if line.strip():
            tried += 1
            for document in read_record(line, f"{path}:{number}", source, bad):
                good += 1
                yield document
            if tried == JUDGED and not good:
                problem = _parsed(line, f"{path}:{number}", source)
                raise InputError(f"{path}:{number}: {problem}; none of the first {JUDGED} lines is a document")


def read_own(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Outcome]:
    """The documents that a step of this toolkit wrote; those with a `reason` as drops."""
    for number, line in enumerate(read_json_lines(path), start=1):
        bad.lines += 1
        document = read_object(line, f"{path}:{number}", ())
        if isinstance(document, str):
            bad.add(f"{path}:{number}: {document}")
        elif "reason" in document:
            reason, detail = document.pop("reason"), document.pop("detail", "")
            yield Drop(document, reason, detail)
        else:
            yield document


def read_csv(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The rows of a file with a header, separated by comma, semicolon or tab.

    Raises InputError for a header without the text's column, and for unbalanced quotes.
    """
    csv.field_size_limit(LONGEST_LINE)  # the default is 131,072 characters
    blocks = read_blocks(path, longest=LONGEST_LINE, encoding=source.encoding)
    lines = (line for block in blocks for line in io.StringIO(block.decode(), newline="\n"))
    try:
        first = next(lines, "")
        delimiter = max(",;\t", key=first.count)  # the most frequent in the header
        rows = csv.reader(chain([first], lines), strict=True, delimiter=delimiter)
        header = next(rows, [])
        if source.text_key not in header:
            raise InputError(f"{path}: no column {source.text_key!r}, but {other_keys(source.text_key, header)}")
        start = rows.line_num + 1
        for row in rows:
            where, start = f"{path}:{start}", rows.line_num + 1
            if row and len(row) != len(header):
                bad.lines += 1
                bad.add(f"{where}: {len(row)} cells, but {len(header)} in the header")
            elif row:
                yield from read_record(orjson.dumps(dict(zip(header, row, strict=True))), where, source, bad)
    except UnicodeDecodeError as error:
        raise EncodingError(f"{path}: not UTF-8 ({error.reason}); set encoding") from None
    except csv.Error as error:
        raise InputError(f"{path}:{rows.line_num}: not CSV ({error}); repair its quotes, or create it again") from None


def read_wikiextractor(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The articles of a WikiExtractor file in either format, without the repeated title."""
    head: tuple[str, Document] | None = None
    lines: list[bytes] = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        if head is None and line.startswith(b"{"):
            yield from read_record(line, where, source, bad)
        elif line.startswith(b"<doc "):
            bad.lines += 1
            if head is not None:
                bad.add(f"{head[0]}: <doc> without </doc>")
            head = None
            lines.clear()
            if match := _WIKI_HEAD.match(line):
                fields = match.groupdict().items()
                head = where, {key: html.unescape(value.decode("utf-8", "replace")) for key, value in fields}
            else:
                bad.add(f"{where}: not the first line of a WikiExtractor article")
        elif head is not None and line.strip() == b"</doc>":
            try:
                text = b"\n".join(lines).decode().strip()
                first, _, rest = text.partition("\n")
                repeats = html.unescape(first) == head[1]["title"] and rest
                yield {**head[1], "text": rest.strip() if repeats else text, "origin": head[0]}
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


def read_record(line: bytes, where: str, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """Yield the document of a JSON object; counts a bad one in `bad`."""
    bad.lines += 1
    document = _parsed(line, where, source)
    if isinstance(document, str):
        bad.add(f"{where}: {document}")
    else:
        yield document


def _parsed(line: bytes, where: str, source: SourceSettings) -> Document | str:
    """The document of a JSON object, or what is wrong with it."""
    given = read_object(line, where, [source.text_key], source.skip_keys)
    if isinstance(given, str):
        return given + _instead(line, source.text_key)
    further = {key: value for key, value in given.items() if key not in (*_OWN, source.text_key)}
    if (size := _size(further)) > _MAX_META:
        largest = max(further, key=lambda key: _size(further[key]))
        return f"{size:,} bytes in further keys, more than {_MAX_META:,}; name {largest!r} under skip_keys"
    named = {"source_id": given.get("id"), "url": given.get("url"), "title": given.get("title")}
    document = {"text": given[source.text_key], "origin": where}
    document |= {key: str(value) for key, value in named.items() if value is not None}
    meta = further.pop("meta") if isinstance(further.get("meta"), dict) else {}
    return {**document, "meta": meta | further} if meta or further else document


def _size(value: object) -> int:
    return len(orjson.dumps(value)) if value else 0


def _instead(line: bytes, key: str) -> str:
    """The keys of a JSON object without `key`, for an error; empty for anything else."""
    with suppress(orjson.JSONDecodeError):
        if isinstance(given := orjson.loads(line), dict) and key not in given:
            return f", but {other_keys(key, list(given))}"
    return ""


def other_keys(key: str, keys: Sequence[str]) -> str:
    """What to say of the keys or columns that are there instead of `key`."""
    more = ", …" if len(keys) > _NAMED else ""
    return f"{', '.join(keys[:_NAMED])}{more}; set text_key{closest(key, keys)}"
