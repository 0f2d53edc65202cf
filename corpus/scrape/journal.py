"""The journal of a crawl: the outcome of each URL, appended as it happens, and kept after the shard is finished.

    OUTPUT.journal         the outcomes of the current run, one JSON object per line
    OUTPUT.journal.zst     the outcomes of all earlier runs (corpus.scrape.zstd_lines): about as large as the shard
    OUTPUT.settings.json   the settings of the crawl (corpus.scrape.outcome_cache)

    {"journal": 2, "settings": {"max_bytes": ..., ...}, "archive": 0}     the first line of either file
    {"url": U, "record": {...}, "bytes": 4711, "size": 4711, "at": 291, "archive": 52311}      a page
    {"url": U, "reason": "http_404"}                               a final failure
    {"url": U, "reason": "dns", "host_failed": true}               a failure of the whole host
    {"url": U, "at": 291, "archive": 52311}                        a response in the archive, not extracted yet
    {"settings": {...}}                                            settings of the outcomes that follow
    {"archive_lost": true}                                         the archive of the lines before is gone

A URL is identified by the form in which it is requested: without fragment, host in ASCII. So the journal does not
depend on the list: URLs may be added, removed or moved. `at` is the offset of the response in the archive, `archive`
the length of the archive after it. The last line of a URL counts, and OUTPUT.journal comes after OUTPUT.journal.zst.
Outcomes of another recorded site (`site` in the settings is its digest) do not count.

Each line reaches the kernel before the next one starts, so kill -9 loses none; `sync` guards against a power cut.
A torn last line is cut off. OUTPUT.journal.zst is only ever replaced by a file that contains as much.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files import open_locked, read_json, write_json
from corpus.scrape import journal_v1
from corpus.scrape.journal_lines import FORMAT, OutcomeSettings, key_of, to_line
from corpus.scrape.outcome_index import LOG, UNKNOWN, OutcomeIndex
from corpus.scrape.zstd_lines import ZstdLines, write_zstd_lines


class Journal(OutcomeIndex):
    """The open journal of a shard; `OutcomeIndex` has the queries. `urls` is the URL list."""

    def __init__(self, output: Path, urls: Sequence[str], keys: Sequence[str], settings: OutcomeSettings) -> None:
        super().__init__(keys, settings)
        self.path = output.with_name(output.name + ".journal")
        self.base_path = output.with_name(output.name + ".journal.zst")
        self.settings_path = output.with_name(output.name + ".settings.json")
        self.archive_end = 0
        """Length of the archive after its last known response."""
        self._current = 0  # number of the settings in force at the end of the file
        self._damaged = 0
        self._base: ZstdLines | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a job that was thought dead and its successor must not both write it
        self._file = open_locked(self.path, f"{self.path}: in use by another scrape; stop that one first")
        try:
            self._convert_old(urls, keys)
            self._load()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if os.fstat(self._file.fileno()).st_size == 0:  # nothing to resume: bad input leaves no file
            self.path.unlink(missing_ok=True)
            if not self.base_path.exists():
                self.settings_path.unlink(missing_ok=True)
        self._file.close()
        if self._base is not None:
            self._base.close()

    # ---------------------------------------------------------------------------------------------- loading

    def _convert_old(self, urls: Sequence[str], keys: Sequence[str]) -> None:
        """Convert a journal of version 0.1 to OUTPUT.journal.zst; a kill before the end changes nothing."""
        header = self._file.readline()
        if journal_v1.is_header(header):
            lines = journal_v1.convert(self._file, header, urls, keys, self.settings, self.path)
            write_zstd_lines(self.base_path, lines)
            self._file.truncate(0)
        self._file.seek(0)

    def _load(self) -> None:
        """Read both files, and cut off a torn last line of OUTPUT.journal."""
        if self.base_path.exists():
            self._base = ZstdLines(self.base_path)
            for number, (frame, start, line) in enumerate(self._base):
                self._read(number, line, frame, start, self.base_path)
        self._end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            self._read(number, line, LOG, self._end, self.path)
            self._end += len(line)
        self._file.truncate(self._end)
        self._opened = self._end
        if self._damaged:
            warn(f"{self.path}: {self._damaged} damaged lines are left out")

    def _read(self, number: int, line: bytes, frame: int, start: int, path: Path) -> None:
        """Take in one line of a file."""
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            entry = None
        if number == 0 and (not isinstance(entry, dict) or entry.get("journal") != FORMAT):
            raise InputError(
                f"{path}: not a journal that this version can read; use the version that wrote it, or move it away "
                "to fetch its pages again"
            )
        if not isinstance(entry, dict):
            self._damaged += 1
            return
        if "settings" in entry:
            self._current = self._add_settings(entry["settings"])
        if "archive_lost" in entry:
            self._forget_archive()
        self.archive_end = max(self.archive_end, entry.get("archive", 0))
        if "url" in entry and self._all_settings[self._current].get("site") == self.settings.get("site"):
            self._update(self._add_url(entry["url"]), entry, self._current, frame, start)

    def _forget_archive(self) -> None:
        self._clear_archive_offsets()
        self.archive_end = 0

    def outcome(self, position: int) -> dict[str, Any]:
        """The last line of a URL."""
        frame, start = self._frame[position], self._start[position]
        if frame != LOG:
            assert self._base is not None
            line = self._base.line(frame, start)
        else:
            self._file.seek(start)
            line = self._file.readline()
        outcome: dict[str, Any] = orjson.loads(line)
        return outcome

    # ---------------------------------------------------------------------------------------------- writing

    def append(self, position: int, url: str, *, settings: OutcomeSettings | None = None, **outcome: Any) -> None:
        """Append the outcome of a URL, made with today's settings unless others are given.

        `record=` and `bytes=`, or `reason=` and perhaps `host_failed=True`; `at=` and `archive=` if the response is in
        the archive.
        """
        number = self._add_settings(self.settings if settings is None else settings)
        if self._end == 0:
            self._write({"journal": FORMAT, "settings": self._all_settings[number]})
        elif number != self._current:
            self._write({"settings": self._all_settings[number]})
        self._current = number
        entry = {"url": key_of(url), **outcome}
        start = self._end
        self._write(entry)
        self.archive_end = max(self.archive_end, entry.get("archive", 0))
        self._update(position, entry, number, LOG, start)

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = to_line(entry)
        self._file.seek(self._end)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def adopt(self, responses: Iterable[tuple[str, int, int, bool]]) -> int:
        """Append responses of the archive that the journal lacks; returns their number.

        Each has a URL, the offset of its record and of the next one, and whether robots.txt was obeyed. The URLs may be
        from any list. Call this once, before `append`: it frees the dictionary of all URLs.
        """
        count = 0
        for url, start, end, obeyed_robots in responses:
            try:
                position = self._add_url(key_of(url))
            except ValueError:
                continue
            settings = {**self.settings, "obey_robots": obeyed_robots}
            self.append(position, url, settings=settings, at=start, archive=end)
            count += 1
        self._positions.clear()
        return count

    def record_lost_archive(self) -> None:
        """Append that the archive is gone."""
        header = {"journal": FORMAT} if self._end == 0 else {}
        self._write({**header, "settings": self.settings})
        self._write({"archive_lost": True})
        self._current = self._add_settings(self.settings)
        self._forget_archive()

    def sync(self) -> None:
        """Wait until all lines are on disk; may be called from another thread."""
        os.fsync(self._file.fileno())

    def accepted_settings(self) -> OutcomeSettings | None:
        """The contents of OUTPUT.settings.json, or None if there is no such file."""
        if not self.settings_path.exists():
            return None
        accepted = read_json(self.settings_path)
        if not isinstance(accepted, dict):
            raise InputError(f"{self.settings_path}: not the settings of a crawl; restore a copy, or delete it")
        return accepted

    def accept_settings(self) -> None:
        """Write today's settings to OUTPUT.settings.json."""
        if self.accepted_settings() != self.settings:
            write_json(self.settings_path, self.settings)

    def finish(self) -> None:
        """After the shard is written: move all outcomes to OUTPUT.journal.zst, and empty OUTPUT.journal.

        Until the second step OUTPUT.journal still has its lines, so a kill between the two loses nothing.
        """
        if self._end > 0:
            write_zstd_lines(self.base_path, self._all_lines())
        self._file.truncate(0)
        self._end = 0

    def _all_lines(self) -> Iterator[bytes]:
        """The last line of every URL; first the list's URLs, in its order."""
        current = self._add_settings(self.settings)
        yield to_line({"journal": FORMAT, "settings": self.settings, "archive": self.archive_end})
        for position, start in enumerate(self._start):
            if start == UNKNOWN:
                continue
            if self._settings_ids[position] != current:
                current = self._settings_ids[position]
                yield to_line({"settings": self._all_settings[current]})
            outcome = self.outcome(position)
            outcome.pop("archive", None)
            outcome["at"] = self._archive_offset[position]
            if outcome["at"] == UNKNOWN:
                del outcome["at"]
            yield to_line(outcome)

    def forget_run(self) -> None:
        """Drop the lines appended since the journal was opened, so that the next run tries these URLs again."""
        self._file.truncate(self._opened)
        self._end = self._opened
