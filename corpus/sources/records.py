"""Documents from objects: the text under one key, further keys under `meta`."""

from collections.abc import Iterator

import orjson

from common.files import BadLines, Document, read_object
from common.settings import SourceSettings

MAX_META = 65_536
"""Bytes of JSON in a document's further keys; a document with more is a bad line."""
_OWN = ("id", "url", "title")  # keys of JSON objects that have their place in a document


def read_record(line: bytes, where: str, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """Yield the document of a JSON object; a bad one is counted in `bad` at `where`."""
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
        "origin": where,
        **{key: str(value) for key, value in named.items() if value is not None},
    }
    meta = further.pop("meta") if isinstance(further.get("meta"), dict) else {}
    yield {**document, "meta": meta | further} if meta or further else document


def _size(value: object) -> int:
    return len(orjson.dumps(value)) if value else 0
