"""The outcomes of earlier runs, and which of them are still valid under today's settings.

There are three kinds of `scrape` keys:

- How a page is fetched (contact, user_agent, resolve, time-outs, delays, concurrency, retries, host_failures, archive):
  these never invalidate an outcome. They apply to the pages that are still to be fetched.
- What an outcome depends on (OUTCOME_KEYS): an outcome that would differ now is made again, from the archive if that
  has the response. Otherwise the run stops until somebody agrees to fetch those pages again.
- obey_robots: if it is turned on, robots.txt is asked about each page that was fetched without it, and pages that it
  forbids are not used. If it is turned off, the URLs that robots.txt forbade are fetched.

URL rules (`blacklist`) are not part of an outcome: each run applies them to all URLs and redirects.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from common.console import note
from common.errors import ConfigError
from common.settings import ScrapeSettings
from corpus.scrape.journal import Journal
from corpus.scrape.journal_lines import OutcomeSettings
from corpus.scrape.outcome_index import ARCHIVED
from corpus.scrape.pages import Outcome
from corpus.urls.rules import UrlRules

OUTCOME_KEYS = ("extractors", "extract_timeout", "max_bytes", "max_redirects", "obey_robots", "host_failures")
"""Keys that the journal stores with every outcome."""
_ROBOTS = frozenset({"robots", "robots_unreachable", "crawl_delay"})
# failures that a larger value of a key may turn into pages
_LIMITS = {"too_large": "max_bytes", "too_many_redirects": "max_redirects"}


def outcome_settings(settings: ScrapeSettings) -> OutcomeSettings:
    """Today's settings as the journal stores them."""
    return settings.model_dump(include=set(OUTCOME_KEYS), mode="json")


class OutcomeCache:
    """The journal of a shard, read under today's settings. `archive`: whether its archive is open."""

    def __init__(self, journal: Journal, settings: ScrapeSettings, rules: UrlRules, archive: bool = False) -> None:
        self.journal, self.settings, self.archive = journal, settings, archive
        self._today, self._rules = journal.settings, rules
        self._max_failures = max([settings.host_failures, *(each["host_failures"] for each in journal.all_settings())])

    def archive_offset(self, position: int) -> int | None:
        """Offset of a response in the archive; None if the archive is not open or lacks it."""
        return self.journal.archive_offset(position) if self.archive else None

    def stale_key(self, position: int) -> str | None:
        """The changed key that makes an outcome invalid, or None."""
        reason, then = self.journal.reason(position), self.journal.settings_of(position)
        if (reason == "ok" or reason.startswith("extract_")) and then["extractors"] != self._today["extractors"]:
            return "extractors"
        if reason == "extract_timeout" and self.archive_offset(position) is not None:
            # kept if there is no archive: a slow extraction is no reason to fetch the page again
            return "extract_timeout" if self.settings.extract_timeout > then["extract_timeout"] else None
        key = _LIMITS.get(reason)
        return key if key and self._today[key] > then[key] else None

    def needs_robots_check(self, position: int) -> bool:
        """Whether robots.txt must be asked before a known outcome may be used."""
        known = bool(self.journal.reason(position))
        return known and self.settings.obey_robots and not self.journal.settings_of(position)["obey_robots"]

    def is_valid(self, position: int) -> bool:
        """Whether the known outcome of a URL is what a fetch would give today, robots.txt aside."""
        reason = self.journal.reason(position)
        if reason in ("", ARCHIVED, "host_parked"):
            return False
        if (
            (reason in _ROBOTS and not self.settings.obey_robots)
            or (reason == "private_host" and self._rules.allow_private)
            or (reason == "no_contact" and self.settings.contact)
        ):
            return False
        if reason == "redirect_refused":
            target = self.journal.outcome(position).get("refused")
            return target is None or self._rules.reason(target) is not None
        return self.stale_key(position) is None

    def is_usable(self, position: int) -> bool:
        """Whether the known outcome of a URL can be used without any request."""
        return self.is_valid(position) and not self.needs_robots_check(position)

    def is_done(self, position: int) -> bool:
        """Whether an earlier run finished a URL, including those of parked hosts."""
        return self.is_usable(position) or self.journal.reason(position) == "host_parked"

    def is_parked(self, position: int, failures: int) -> bool:
        """Whether a URL is given up after this many failures of its host in a row, as in a crawl from scratch.

        If scrape.host_failures has changed, a known page is not given up, and a URL that was given up is not tried.
        """
        limit = self.settings.host_failures
        reason = self.journal.reason(position)
        if reason == "host_parked":
            limit = min(limit, self.journal.settings_of(position)["host_failures"])
        elif reason:
            limit = self._max_failures
        return failures >= limit

    def outcome(self, position: int) -> Outcome:
        """The outcome of a known URL under today's limits and rules."""
        outcome = self.journal.outcome(position)
        if "record" not in outcome:
            return outcome
        if outcome.get("size", outcome["bytes"]) > self.settings.max_bytes:
            return {"reason": "too_large"}
        if any(map(self._rules.reason, _redirect_chain(outcome)[1:])):
            return {"reason": "redirect_refused"}
        return outcome

    def redirect_chain(self, position: int) -> list[str]:
        """A known URL, and the URLs that its redirects led to."""
        return _redirect_chain(self.journal.outcome(position))

    def confirm_refetch(self, positions: Iterable[int], refetch: bool) -> None:
        """Raise ConfigError if changed keys would fetch pages again that the archive lacks, unless that is agreed to.

        One agrees by `refetch`, or by deleting OUTPUT.settings.json; the file then records that for later runs.
        """
        accepted = self.journal.accepted_settings()
        counts: Counter[str] = Counter()
        before: dict[str, Any] = {}
        in_closed_archive = 0
        for position in positions:
            key = self.stale_key(position)
            if key and self.archive_offset(position) is None:
                if accepted is not None and accepted.get(key) == self._today[key]:
                    continue
                counts[key] += 1
                before.setdefault(key, self.journal.settings_of(position)[key])
                in_closed_archive += self.journal.archive_offset(position) is not None
        if counts:
            changes = ", ".join(
                f"scrape.{key} was {_shown(before[key])} and is {_shown(self._today[key])} ({count} URLs)"
                for key, count in counts.items()
            )
            total = counts.total()
            if not refetch and accepted is not None:
                hint = (
                    f", {in_closed_archive} of them are in its archive if you name that by --archive"
                    if in_closed_archive
                    else ""
                )
                raise ConfigError(
                    f"{self.journal.settings_path}: {changes}: {total} URLs would be fetched again{hint}; set the key "
                    "back, or agree by --refetch or by deleting this file"
                )
            note(f"{changes}: {total} URLs are fetched again")
        self.journal.accept_settings()


def _redirect_chain(outcome: Outcome) -> list[str]:
    final = outcome["record"]["final_url"] if "record" in outcome else outcome["url"]
    return [outcome["url"], *outcome.get("hops", ()), *([final] if final != outcome["url"] else [])]


def _shown(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
