"""The journal of a run: what became of each URL, appended as it happens, so that a killed run goes on where it was.

One JSON object a line. The first says which run the journal belongs to, each other one settles a URL:

    {"urls": <sha256 of the list>, "settings": <sha256 of what shapes the result>, ...}
    {"position": 17, "archive": 52311, "record": {...}, "bytes": 4711}     a page; archive = the WARC's length after it
    {"position": 18, "archive": 52311, "reason": "http_404"}               a failure that is final
    {"position": 19, "archive": 52311, "reason": "dns", "host_failed": true}     one that speaks against the whole host

A line reaches the kernel before the next one starts, so kill -9 loses none; `sync` guards against a power cut.
A torn last line is cut off when the journal is opened again.
"""

import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from common.files import lock


class Journal:
    """The open journal of a list of `count` URLs. `owner` names the run; the journal of another one is discarded."""

    def __init__(self, path: Path, owner: Mapping[str, Any], count: int) -> None:
        self.path = path
        self.finished = 0
        self.archive_end = 0
        """Length of the WARC when the last line was written; whatever lies behind it belongs to no finished page."""
        self._offsets = array("q", [-1]) * count  # 8 bytes a URL: where its line starts, -1 = not finished
        self._host_failed = bytearray(count)  # a byte a URL: 1 when its line says so
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by __exit__
        try:
            # two runs must not fill one journal (a job that was thought dead, and its successor)
            lock(self._file, f"{path}: in use by another scrape; stop that one first")
            self._recover(dict(owner))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self.finished:  # nothing to go on from: bad input leaves no file behind
            self.path.unlink(missing_ok=True)

    def _recover(self, owner: dict[str, Any]) -> None:
        """Read the lines of an earlier run and cut off a torn end."""
        good = 0
        for number, line in enumerate(self._file):
            try:
                entry = orjson.loads(line) if line.endswith(b"\n") else None
            except orjson.JSONDecodeError:
                entry = None
            if entry is None or (number == 0 and entry != owner):
                break
            if number > 0:
                self._note(entry, good)
            good += len(line)
        self._end = good
        self._file.truncate(good)
        if good == 0:
            self._write(owner)

    def _note(self, entry: dict[str, Any], offset: int) -> None:
        self._offsets[entry["position"]] = offset
        self._host_failed[entry["position"]] = entry.get("host_failed", False)
        self.archive_end = entry["archive"]
        self.finished += 1

    def _write(self, entry: dict[str, Any]) -> None:
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._file.seek(self._end)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def __contains__(self, position: int) -> bool:
        return self._offsets[position] >= 0

    def append(self, position: int, archive_end: int, **outcome: Any) -> None:
        """Settle the URL at `position`: `record=` and `bytes=`, or `reason=` and perhaps `host_failed=True`."""
        entry = {"position": position, "archive": archive_end, **outcome}
        start = self._end
        self._write(entry)
        self._note(entry, start)

    def host_failed(self, position: int) -> bool:
        """Whether a finished URL failed because its host is ill."""
        return bool(self._host_failed[position])

    def outcome(self, position: int) -> dict[str, Any]:
        """What was settled for a finished URL."""
        self._file.seek(self._offsets[position])
        outcome: dict[str, Any] = orjson.loads(self._file.readline())
        return outcome

    def sync(self) -> None:
        """Wait until the disk has every line; safe to call from another thread."""
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the file: its content is in the finished shard."""
        self.path.unlink(missing_ok=True)
