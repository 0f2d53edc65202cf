"""Find and remove the entries of documents in the files of a run.

    removal = Removal({"302544148050df60"})
    count = remove_from(path, removal)              # counts the entries; writes nothing
    count = remove_from(path, removal, path)        # removes them; the file is replaced as a whole

Each kind of file has an editor. An edited shard equals what its step writes without the documents.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from common.errors import InputError, TruncatedError
from common.files import line_writer, read_json, read_lines, write_json
from corpus.scrape.archive import REQUESTED_HEADER, write_records
from corpus.scrape.warc import DAMAGED, complete_records, read_records
from corpus.urls.url import document_id
from workflow.provenance.sample import read_any

_ID = re.compile(rb'"id":"([0-9a-f]{16})"')
_NAME = re.compile(rb"https?://[^\s\"'<>\\]+|\b[0-9a-f]{16}\b")


class Removal:
    """The documents to remove, by their ids."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = frozenset(ids)

    def has_url(self, url: str) -> bool:
        """Whether a URL, in any spelling, names one of them."""
        try:
            return document_id(url) in self.ids
        except ValueError:
            return False

    def has_name(self, name: str) -> bool:
        """Whether a name is the id or a URL of one of them."""
        return name in self.ids or ("/" in name and self.has_url(name))

    def has_line(self, line: bytes) -> bool:
        """Whether a line of JSON is a document, a reject or an outcome of one of them."""
        if match := _ID.search(line):
            return match[1].decode() in self.ids
        with suppress(ValueError):  # the torn line of a journal
            return self.has_url(str(orjson.loads(line).get("url")))
        return False

    def is_named(self, line: bytes) -> bool:
        """Whether a line of text has the URL or the id of one of them."""
        names = (name.decode("utf-8", "replace") for name in _NAME.findall(line))
        return any(self.has_name(name) or self.has_name(name.rstrip(".,:;)")) for name in names)


Editor = Callable[[Path, Removal, Path | None], int]


def remove_from(path: Path, removal: Removal, output: Path | None = None) -> int:
    """Count the entries in a file; with `output`, which may be the same file, write the rest."""
    editor = editor_of(path)
    return editor(path, removal, output) if editor else 0


def redirected(path: Path, removal: Removal) -> Iterator[str]:
    """The ids of a shard's pages whose request was redirected to a removed page."""
    for page in read_any(path):
        if page["final_url"] != page["url"] and removal.has_url(page["final_url"]):
            yield page["id"]


def editor_of(path: Path) -> Editor | None:
    """The editor of a file; None if files of its kind have no entries."""
    name = path.name
    if name.endswith((".jsonl.zst", ".journal")):
        return partial(_edit_lines, Removal.has_line)
    if name.endswith(".warc.gz"):
        return _edit_archive
    if name.endswith(".txt") and path.parent.name == "urls":
        return partial(_edit_lines, lambda removal, line: removal.has_url(line.decode()))
    if name.endswith(".json"):
        return _edit_statistics
    if name.endswith((".log", ".out", ".txt", ".html", ".md", ".jsonl")):
        return partial(_edit_lines, Removal.is_named)
    return None


def _edit_lines(matches: Callable[[Removal, bytes], bool], path: Path, removal: Removal, output: Path | None) -> int:
    count = 0
    with line_writer(output) as write:
        for line in read_lines(path):
            if line and matches(removal, line):
                count += 1
            else:
                write(line + b"\n")
    return count


def _edit_statistics(path: Path, removal: Removal, output: Path | None) -> int:
    """Edit statistics: examples and lists of ids."""
    count = 0

    def kept(value: Any) -> bool:
        nonlocal count
        named = [value.get("id"), value.get("url")] if isinstance(value, dict) else [value]
        is_named = any(isinstance(name, str) and removal.has_name(name) for name in named)
        count += is_named
        return not is_named

    def pruned(value: Any) -> Any:
        if isinstance(value, list):
            return [pruned(inner) for inner in value if kept(inner)]
        return {key: pruned(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    rest = pruned(read_json(path))
    if output:
        write_json(output, rest)
    return count


def _edit_archive(path: Path, removal: Removal, output: Path | None) -> int:
    """Edit a WARC file with one gzip member per record; other members are copied unchanged."""

    def names(record: Any) -> list[str]:
        headers = [record.rec_headers.get_header(name, "") for name in (REQUESTED_HEADER, "WARC-Target-URI")]
        return [url for url in headers if url and record.rec_type == "response"]

    count, at, responses = 0, 0, dict[str, int]()
    with path.open("rb") as file, line_writer(output) as write, suppress(TruncatedError):  # a crawl cuts off a torn end
        last = max((end for _, end, _ in complete_records(file, path, names)), default=0)
        file.seek(0)
        for start, end, urls in read_records(file, path, names):
            if not end:
                raise InputError(f"{path}: many records in one gzip member; not an archive of corpus.scrape")
            if urls is not DAMAGED and any(map(removal.has_url, urls)):
                count += 1
            else:
                write(os.pread(file.fileno(), end - start, start))
                if urls is not DAMAGED and urls:
                    responses[urls[0]] = at
                at += end - start
            if end == last:
                break
    if output:
        write_records(output, responses)
    return count
