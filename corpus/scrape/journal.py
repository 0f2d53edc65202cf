"""The journal of a crawl: the outcome of each URL, appended at once and kept with the shard.

    OUTPUT.journal         the outcomes of all runs, one JSON object per line
    OUTPUT.settings.json   the settings that the user consented to

    {"url": U, "settings": S, "record": {...}, "bytes": 4711, "size": 4711, "date": D}   page
    {"url": U, "settings": S, "reason": "http_404"}                                      failure
    {"url": U, "settings": S, "reason": "dns", "host_failed": true}      failure of the host

A redirected page also has `hops`. `settings` are those that the outcome was made with; an outcome
of another recorded site (their `site`) does not count. A URL is identified by its requested form
(no fragment, host in ASCII), so the URL list may change. The last line of a URL counts.

Each line is written to the kernel before the next one starts, so kill -9 loses none; `sync` guards
against a power cut. What follows the last complete line is cut off; the file is never rewritten.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files import is_torn, open_locked, read_json, write_json
from corpus.urls.url import parse_url

OutcomeSettings = dict[str, Any]
"""The settings that an outcome depends on, by key."""
Entry = dict[str, Any]
"""A line of the journal."""
_HEAD = 1 << 16  # bytes read of a file without a complete line


def key_of(url: str) -> str:
    """The form of a URL that identifies it in a journal. Raises ValueError for a malformed URL."""
    return parse_url(url).text


def _entry(line: bytes) -> Entry | None:
    """The outcome on a line; None if it is damaged or torn."""
    try:
        entry: Any = orjson.loads(line) if line.endswith(b"\n") else None
        return entry if isinstance(entry["url"], str) and isinstance(entry["settings"], dict) else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


class Journal:
    """The open journal of a shard: `known[key_of(url)]` is the last line of a URL.

    All outcomes are held in memory. `settings` are today's.
    """

    def __init__(self, output: Path, settings: OutcomeSettings) -> None:
        self.path = output.with_name(output.name + ".journal")
        self.settings_path = output.with_name(output.name + ".settings.json")
        self.settings = settings
        self.known: dict[str, Entry] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # two runs must not both write it
        self._file = open_locked(self.path, f"{self.path}: in use by another scrape; stop that one first")
        try:
            self._load()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        if os.fstat(self._file.fileno()).st_size == 0:  # nothing to resume: bad input leaves no file
            self.path.unlink(missing_ok=True)
            self.settings_path.unlink(missing_ok=True)
        self._file.close()

    def _load(self) -> None:
        """Read the file, and cut off what follows its last complete line."""
        end = at = damaged = torn = 0
        for line in self._file:
            at += len(line)
            if (entry := _entry(line)) is None:
                torn += 1
                continue
            if entry["settings"].get("site") == self.settings.get("site"):
                self.known[entry["url"]] = entry
            end, damaged, torn = at, damaged + torn, 0
        self._file.seek(0)
        if not end and not is_torn(self._file.read(_HEAD), b'{"url":'):
            cure = "not a journal of corpus.scrape; move it away to fetch its pages again"
            raise InputError(f"{self.path}: {cure}")
        self._opened = self._file.seek(end)
        self._file.truncate()
        if damaged:
            warn(f"{self.path}: {damaged} damaged lines are left out")

    def append(self, url: str, **outcome: Any) -> None:
        """Append a line: the outcome of a URL, made with today's settings."""
        entry = {"url": key_of(url), "settings": self.settings, **outcome}
        self._file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        self.known[entry["url"]] = entry

    def sync(self) -> None:
        """Wait until all lines are on disk; may be called from another thread."""
        os.fsync(self._file.fileno())

    def accepted_settings(self) -> OutcomeSettings | None:
        """The contents of OUTPUT.settings.json: empty if damaged, None if there is no such file."""
        if not self.settings_path.exists():
            return None
        with suppress(InputError):
            if isinstance(accepted := read_json(self.settings_path), dict):
                return accepted
        warn(f"{self.settings_path}: damaged; nothing is taken as agreed, and it is written again")
        return {}

    def accept_settings(self) -> None:
        """Write today's settings to OUTPUT.settings.json."""
        write_json(self.settings_path, self.settings)

    def forget_run(self) -> None:
        """Drop the lines appended since opening: the next run tries these URLs again."""
        self._file.seek(self._opened)
        self._file.truncate()
