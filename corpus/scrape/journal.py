"""The record of a crawl: what became of each URL, appended as it happens, and kept when the shard is finished.

    OUTPUT.journal         the outcomes of a run under way, one JSON object per line
    OUTPUT.journal.zst     those of all runs before it, in frames (corpus.scrape.frames): about as large as the shard
    OUTPUT.settings.json   the settings that the crawl was made with (corpus.scrape.known)

    {"journal": 2, "settings": {"max_bytes": ..., ...}, "archive": 0}     the first line of either file
    {"url": U, "record": {...}, "bytes": 4711, "size": 4711, "at": 291, "archive": 52311}      a page
    {"url": U, "reason": "http_404"}                               a failure that is final
    {"url": U, "reason": "dns", "host_failed": true}               one that speaks against the whole host
    {"url": U, "at": 291, "archive": 52311}                        a response in the archive, not extracted yet
    {"settings": {...}}                                            settings of the outcomes that follow
    {"archive_lost": true}                                         the archive of the lines before is gone

A URL is known by the form in which it is requested: without its fragment, its host in ASCII. So the record depends on
no list: URLs may be added to it, removed or moved. `at` is the offset of the response in the archive, `archive` the
length of the archive after it. The last line of a URL counts, and OUTPUT.journal after OUTPUT.journal.zst. What was
found on another recorded site (`site` among the settings: the digest of one) does not count.

A line reaches the kernel before the next one starts, so kill -9 loses none; `sync` guards against a power cut.
A torn last line is cut off. OUTPUT.journal.zst is only ever replaced by one that holds as much.
"""

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files import lock, read_json, write_json
from corpus.scrape import journal_v1
from corpus.scrape.frames import FramedLines, write_frames
from corpus.scrape.journal_lines import FORMAT, Made, key_of, to_line

ARCHIVED = "archived"
"""`Journal.reason` of a URL whose response is in the archive, and nothing else known."""
_UNKNOWN = -1  # no line, no place in the archive
_LOG = -1  # instead of a frame's offset: the line is in OUTPUT.journal


class Journal:
    """The open record of a shard. URLs of the list have its positions, others that are known come after them.

    `urls` is the list, `keys` their `key_of` ("" for those that are not fetched), `made` the settings of today.
    """

    def __init__(self, output: Path, urls: Sequence[str], keys: Sequence[str], made: Made) -> None:
        self.path = output.with_name(output.name + ".journal")
        self.base_path = output.with_name(output.name + ".journal.zst")
        self.settings_path = output.with_name(output.name + ".settings.json")
        self.made = made
        self.finished = 0
        """URLs of the list that have an outcome."""
        self.archive_end = 0
        """Length of the archive after its last response that is known."""
        self._listed, self._urls = len(keys), urls
        self._positions = {key: position for position, key in enumerate(keys) if key}
        # 23 bytes a URL. Where its line is: offset of the frame (or _LOG), offset of the line
        self._frame, self._start = array("q", [_LOG]) * len(keys), array("q", [_UNKNOWN]) * len(keys)
        self._at = array("q", [_UNKNOWN]) * len(keys)
        self._reason, self._made = array("H", [0]) * len(keys), array("H", [0]) * len(keys)
        self._host_failed = bytearray(len(keys))
        self._reasons, self._reason_ids = [""], {"": 0}
        self._settings: list[Made] = [made]
        self._current = 0  # which of the settings the last line of a file was made with
        self._damaged = 0
        self._base: FramedLines | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        try:
            self._take_over(keys)
            self._load()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _open(self) -> IO[bytes]:
        """OUTPUT.journal, locked: two runs must not fill one (a job that was thought dead, and its successor)."""
        while True:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                lock(file, f"{self.path}: in use by another scrape; stop that one first")
                if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # another run has just finished and removed it

    def _close(self) -> None:
        if os.fstat(self._file.fileno()).st_size == 0:  # nothing to go on from: bad input leaves no file behind
            self.path.unlink(missing_ok=True)
            if not self.base_path.exists():
                self.settings_path.unlink(missing_ok=True)
        self._file.close()
        if self._base is not None:
            self._base.close()

    # ---------------------------------------------------------------------------------------------- reading

    def _take_over(self, keys: Sequence[str]) -> None:
        """A journal of version 0.1 becomes an OUTPUT.journal.zst; a kill before the end of that changes nothing."""
        header = self._file.readline()
        if journal_v1.is_header(header):
            lines = journal_v1.converted(self._file, header, self._urls, keys, self.made, self.path)
            write_frames(self.base_path, lines)
            self._file.truncate(0)
        self._file.seek(0)

    def _load(self) -> None:
        """Read both files, and cut off the torn end of OUTPUT.journal."""
        if self.base_path.exists():
            self._base = FramedLines(self.base_path)
            for number, (frame, start, line) in enumerate(self._base):
                self._read(number, line, frame, start, self.base_path)
        self._end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            self._read(number, line, _LOG, self._end, self.path)
            self._end += len(line)
        self._file.truncate(self._end)
        self._opened = self._end
        if self._damaged:
            warn(f"{self.path}: {self._damaged} damaged lines are left out")

    def _read(self, number: int, line: bytes, frame: int, start: int, path: Path) -> None:
        """Take in one line."""
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
            self._current = self._settings_id(entry["settings"])
        if "archive_lost" in entry:
            self._lose_archive()
        self.archive_end = max(self.archive_end, entry.get("archive", 0))
        if "url" in entry and self._settings[self._current].get("site") == self.made.get("site"):
            self._note(self._position(entry["url"]), entry, frame, start)

    def _position(self, key: str) -> int:
        """The position of a URL; one that is not in the list gets the next number."""
        position = self._positions.setdefault(key, len(self._start))
        if position == len(self._start):
            for column, empty in ((self._frame, _LOG), (self._start, _UNKNOWN), (self._at, _UNKNOWN)):
                column.append(empty)
            self._reason.append(0)
            self._made.append(0)
            self._host_failed.append(0)
        return position

    def _settings_id(self, made: Made) -> int:
        if made not in self._settings:
            self._settings.append(made)
        return self._settings.index(made)

    def _note(self, position: int, entry: Mapping[str, Any], frame: int, start: int) -> None:
        """What a line says of its URL."""
        known = self.reason(position)
        if "record" in entry:
            reason = "plain" if entry["record"]["extractor"] == "plain" else "ok"
        else:
            reason = entry.get("reason", "")
        if "at" in entry:
            self._at[position] = entry["at"]
        if not reason and known:
            return  # only its place in the archive is new
        if position < self._listed and reason and known in ("", ARCHIVED):
            self.finished += 1
        reason = reason or ARCHIVED
        if reason not in self._reason_ids:
            self._reason_ids[reason] = len(self._reasons)
            self._reasons.append(reason)
        self._reason[position] = self._reason_ids[reason]
        self._made[position] = self._current
        self._host_failed[position] = entry.get("host_failed", False)
        self._frame[position], self._start[position] = frame, start

    def _lose_archive(self) -> None:
        self._at = array("q", [_UNKNOWN]) * len(self._at)
        self.archive_end = 0

    # ---------------------------------------------------------------------------------------------- asking

    def reason(self, position: int) -> str:
        """Of a page `ok` (`plain`: a plain text), of a failure its reason, `archived`, or "" where nothing is known."""
        return self._reasons[self._reason[position]]

    def host_failed(self, position: int) -> bool:
        """Whether a known URL failed because its host is ill."""
        return bool(self._host_failed[position])

    def made_with(self, position: int) -> Made:
        """The settings that a known outcome was made with."""
        return self._settings[self._made[position]]

    def all_settings(self) -> list[Made]:
        """All settings that any outcome was made with."""
        return self._settings

    def archived_at(self, position: int) -> int | None:
        """Offset of the response in the archive, or None."""
        return None if self._at[position] == _UNKNOWN else self._at[position]

    def is_page_outside_archive(self, position: int) -> bool:
        """Whether a URL is known to have a page, and the archive has not got it."""
        reason = self.reason(position)
        return self._at[position] == _UNKNOWN and (reason in ("ok", "plain") or reason.startswith("extract_"))

    def outcome(self, position: int) -> dict[str, Any]:
        """What is known of a URL, as its line says it."""
        frame, start = self._frame[position], self._start[position]
        if frame != _LOG:
            assert self._base is not None
            line = self._base.line(frame, start)
        else:
            self._file.seek(start)
            line = self._file.readline()
        outcome: dict[str, Any] = orjson.loads(line)
        return outcome

    # ---------------------------------------------------------------------------------------------- writing

    def append(self, position: int, url: str, *, made: Made | None = None, **outcome: Any) -> None:
        """Note the outcome of a URL, made with today's settings if no others are given.

        `record=` and `bytes=`, or `reason=` and perhaps `host_failed=True`; with `at=` and `archive=` where the
        response is in the archive.
        """
        number = self._settings_id(self.made if made is None else made)
        if self._end == 0:
            self._write({"journal": FORMAT, "settings": self._settings[number]})
        elif number != self._current:
            self._write({"settings": self._settings[number]})
        self._current = number
        entry = {"url": key_of(url), **outcome}
        start = self._end
        self._write(entry)
        self.archive_end = max(self.archive_end, entry.get("archive", 0))
        self._note(position, entry, _LOG, start)

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = to_line(entry)
        self._file.seek(self._end)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def adopt(self, responses: Iterable[tuple[str, int, int, bool]]) -> int:
        """Note responses of the archive that no line speaks of; their number.

        Each has a URL, the offset of its record, that of the next one, and whether robots.txt was obeyed. It takes URLs
        of any list, and the dictionary of all URLs, which is dropped afterwards: call it once, before `append`.
        """
        count = 0
        for url, start, end, obeyed in responses:
            try:
                position = self._position(key_of(url))
            except ValueError:
                continue
            self.append(position, url, made={**self.made, "obey_robots": obeyed}, at=start, archive=end)
            count += 1
        self._positions.clear()
        self._urls = ()
        return count

    def lose_archive(self) -> None:
        """Note that the archive is gone."""
        self._write({"journal": FORMAT, "settings": self.made} if self._end == 0 else {"settings": self.made})
        self._write({"archive_lost": True})
        self._current = self._settings_id(self.made)
        self._lose_archive()

    def sync(self) -> None:
        """Wait until the disk has every line; safe to call from another thread."""
        os.fsync(self._file.fileno())

    def agreed_settings(self) -> Made | None:
        """OUTPUT.settings.json, or None where there is none."""
        if not self.settings_path.exists():
            return None
        agreed = read_json(self.settings_path)
        if not isinstance(agreed, dict):
            raise InputError(f"{self.settings_path}: not the settings of a crawl; put a copy back, or delete it")
        return agreed

    def agree(self) -> None:
        """Today's settings into OUTPUT.settings.json."""
        if self.agreed_settings() != self.made:
            write_json(self.settings_path, self.made)

    def finish(self) -> None:
        """The shard is on the disk: everything known goes into OUTPUT.journal.zst, OUTPUT.journal goes away.

        Until the second step the first file holds all that the second one holds, so a kill in between loses nothing.
        """
        if self._end > 0:
            write_frames(self.base_path, self._all_lines())
        self._file.truncate(0)
        self._end = 0

    def _all_lines(self) -> Iterator[bytes]:
        """The last line of every URL, those of the list first and in its order."""
        current = self._settings_id(self.made)
        yield to_line({"journal": FORMAT, "settings": self.made, "archive": self.archive_end})
        for position, start in enumerate(self._start):
            if start == _UNKNOWN:
                continue
            if self._made[position] != current:
                current = self._made[position]
                yield to_line({"settings": self._settings[current]})
            outcome = self.outcome(position)
            outcome.pop("archive", None)
            outcome["at"] = self._at[position]
            if outcome["at"] == _UNKNOWN:
                del outcome["at"]
            yield to_line(outcome)

    def forget_run(self) -> None:
        """Forget what was noted since the journal was opened: the next run tries it again."""
        self._file.truncate(self._opened)
        self._end = self._opened
