"""The journal of an unfinished crawl as version 0.1 wrote it: outcomes by position in one list of URLs.

{"urls": <sha256 of the list>, "settings": <sha256>, "archive": false}
{"position": 17, "archive": 52311, "record": {...}, "bytes": 4711}
{"position": 19, "archive": 52311, "reason": "dns", "host_failed": true}
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from corpus.scrape.journal_lines import FORMAT, Made, key_of, to_line


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def is_header(line: bytes) -> bool:
    """Whether a journal that begins with this line is of this version."""
    header = _parse(line)
    return isinstance(header, dict) and {"urls", "settings", "archive"} == header.keys()


def converted(
    lines: Iterable[bytes], header: bytes, urls: Sequence[str], keys: Sequence[str], made: Made, path: Path
) -> Iterator[bytes]:
    """The lines of today's journal that say the same; `keys` are the `key_of` the list `urls`.

    Pages name their URLs, failures only a position: they are kept where the list is still the same. What the settings
    were cannot be told: robots.txt is asked again, the others are taken to be `made`, today's. Where responses are in
    the archive stands nowhere, so the whole archive is looked through again.
    """
    same_list = orjson.loads(header)["urls"] == hashlib.sha256("\n".join(urls).encode()).hexdigest()
    print(
        f"scrape: {path} is of an earlier version and taken over: pages are kept, "
        + ("failures, too" if same_list else "failures are tried again, for the list is another one now"),
        file=sys.stderr,
    )
    yield to_line({"journal": FORMAT, "settings": {**made, "obey_robots": False}, "archive": 0})
    for line in lines:
        entry = _parse(line)
        if not isinstance(entry, dict):
            continue  # torn
        position, _ = entry.pop("position"), entry.pop("archive")
        if "record" in entry:
            yield to_line({"url": key_of(entry["record"]["url"]), **entry})
        elif same_list and keys[position] and entry["reason"] != "host_parked":
            yield to_line({"url": keys[position], **entry})
