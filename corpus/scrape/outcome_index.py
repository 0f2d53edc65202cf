"""What a journal says of each URL, held in memory: 23 bytes per URL."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from corpus.scrape.journal_lines import OutcomeSettings

ARCHIVED = "archived"
"""`reason` of a URL whose response is in the archive, with no outcome yet."""
UNKNOWN = -1
"""No line, or no offset in the archive."""
LOG = -1
"""Instead of a frame's offset: the line is in OUTPUT.journal."""


class OutcomeIndex:
    """The outcomes by position in the URL list. Other known URLs have the positions after it.

    `keys` are the `key_of` of each URL in the list ("" for those that are not fetched), `settings` today's.
    """

    def __init__(self, keys: Sequence[str], settings: OutcomeSettings) -> None:
        self.settings = settings
        self.finished = 0
        """URLs of the list that have an outcome."""
        self._listed = len(keys)
        self._positions = {key: position for position, key in enumerate(keys) if key}
        # where the line is: offset of its frame (or LOG), offset in the frame
        self._frame, self._start = array("q", [LOG]) * len(keys), array("q", [UNKNOWN]) * len(keys)
        self._archive_offset = array("q", [UNKNOWN]) * len(keys)
        self._reason, self._settings_ids = array("H", [0]) * len(keys), array("H", [0]) * len(keys)
        self._host_failed = bytearray(len(keys))
        self._reasons, self._reason_ids = [""], {"": 0}
        self._all_settings: list[OutcomeSettings] = [settings]

    # ---------------------------------------------------------------------------------------------- queries

    def reason(self, position: int) -> str:
        """`ok` for a page (`plain` for plain text), the reason of a failure, `archived`, or "" for an unknown URL."""
        return self._reasons[self._reason[position]]

    def host_failed(self, position: int) -> bool:
        """Whether a URL failed because of its host."""
        return bool(self._host_failed[position])

    def settings_of(self, position: int) -> OutcomeSettings:
        """The settings that an outcome was made with."""
        return self._all_settings[self._settings_ids[position]]

    def all_settings(self) -> list[OutcomeSettings]:
        """All settings that any outcome was made with."""
        return self._all_settings

    def archive_offset(self, position: int) -> int | None:
        """Offset of the response in the archive, or None."""
        return None if self._archive_offset[position] == UNKNOWN else self._archive_offset[position]

    def is_page_outside_archive(self, position: int) -> bool:
        """Whether a URL has a page that is not in the archive."""
        reason = self.reason(position)
        return self._archive_offset[position] == UNKNOWN and (
            reason in ("ok", "plain") or reason.startswith("extract_")
        )

    # ---------------------------------------------------------------------------------------------- updates

    def _add_url(self, key: str) -> int:
        """The position of a URL; one that is not in the list gets the next number."""
        position = self._positions.setdefault(key, len(self._start))
        if position == len(self._start):
            columns = ((self._frame, LOG), (self._start, UNKNOWN), (self._archive_offset, UNKNOWN))
            for column, empty in columns:
                column.append(empty)
            self._reason.append(0)
            self._settings_ids.append(0)
            self._host_failed.append(0)
        return position

    def _add_settings(self, settings: OutcomeSettings) -> int:
        """The number of these settings, which are added if they are new."""
        if settings not in self._all_settings:
            self._all_settings.append(settings)
        return self._all_settings.index(settings)

    def _update(self, position: int, entry: Mapping[str, Any], settings_id: int, frame: int, start: int) -> None:
        """Take in one line about a URL."""
        known = self.reason(position)
        if "record" in entry:
            reason = "plain" if entry["record"]["extractor"] == "plain" else "ok"
        else:
            reason = entry.get("reason", "")
        if "at" in entry:
            self._archive_offset[position] = entry["at"]
        if not reason and known:
            return  # only the offset in the archive is new
        if position < self._listed and reason and known in ("", ARCHIVED):
            self.finished += 1
        reason = reason or ARCHIVED
        if reason not in self._reason_ids:
            self._reason_ids[reason] = len(self._reasons)
            self._reasons.append(reason)
        self._reason[position] = self._reason_ids[reason]
        self._settings_ids[position] = settings_id
        self._host_failed[position] = entry.get("host_failed", False)
        self._frame[position], self._start[position] = frame, start

    def _clear_archive_offsets(self) -> None:
        self._archive_offset = array("q", [UNKNOWN]) * len(self._archive_offset)
