"""Convert the journal that version 0.1 left for an unfinished crawl: outcomes by position in one URL list.

{"urls": <sha256 of the list>, "settings": <sha256>, "archive": false}
{"position": 17, "archive": 52311, "record": {...}, "bytes": 4711}
{"position": 19, "archive": 52311, "reason": "dns", "host_failed": true}
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from common.console import note
from corpus.scrape.journal_lines import FORMAT, OutcomeSettings, key_of, to_line


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def is_header(line: bytes) -> bool:
    """Whether a journal with this first line has this version."""
    header = _parse(line)
    return isinstance(header, dict) and {"urls", "settings", "archive"} == header.keys()


def convert(
    lines: Iterable[bytes],
    header: bytes,
    urls: Sequence[str],
    keys: Sequence[str],
    settings: OutcomeSettings,
    path: Path,
) -> Iterator[bytes]:
    """The same journal in today's format; `keys` are the `key_of` of each URL in the list `urls`.

    Pages name their URLs, failures only a position, so failures are kept only if the list is unchanged. The old
    settings are unknown: robots.txt is asked again, and all other settings are assumed to be today's. The positions of
    responses in the archive are unknown too, so the whole archive is scanned again.
    """
    same_list = orjson.loads(header)["urls"] == hashlib.sha256("\n".join(urls).encode()).hexdigest()
    note(
        f"{path} is of an earlier version and is converted: pages are kept, "
        + ("failures too" if same_list else "failures are tried again, because the list has changed")
    )
    yield to_line({"journal": FORMAT, "settings": {**settings, "obey_robots": False}, "archive": 0})
    for line in lines:
        entry = _parse(line)
        if not isinstance(entry, dict):
            continue  # torn
        position, _ = entry.pop("position"), entry.pop("archive")
        if "record" in entry:
            yield to_line({"url": key_of(entry["record"]["url"]), **entry})
        elif same_list and keys[position] and entry["reason"] != "host_parked":
            yield to_line({"url": keys[position], **entry})
