"""What an earlier run found out, and how much of it still holds under today's settings.

Three kinds of keys of `scrape`:

- How a page is fetched (contact, user_agent, resolve, time-outs, delays, concurrency, retries, host_failures, archive):
  never undoes anything. It counts for the pages that are still to be fetched.
- What is made of a page (MADE_WITH): an outcome that would be another one now is made again, from the archive where
  that has the response. Where it has not, the run stops until somebody agrees to fetch those pages again.
- obey_robots: switched on, robots.txt is asked about every page that was fetched without, and what it forbids is not
  used. Switched off, the URLs that it forbade count as new.

URL rules (`blacklist`) are no facts about pages: each run judges all URLs and redirects by them.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from common.errors import ConfigError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.journal import ARCHIVED, Journal
from corpus.scrape.journal_lines import Made
from corpus.scrape.pages import Outcome
from corpus.urls.rules import UrlRules

MADE_WITH = ("extractors", "extract_timeout", "max_bytes", "max_redirects", "obey_robots", "host_failures")
"""Keys that the journal keeps with every outcome."""
_ROBOTS = frozenset({"robots", "robots_unreachable", "crawl_delay"})
# a failure that a larger value of a key may turn into a page
_LIMITS = {"too_large": "max_bytes", "too_many_redirects": "max_redirects"}


def made_with(settings: ScrapeSettings) -> Made:
    """The settings of today as the journal keeps them."""
    return settings.model_dump(include=set(MADE_WITH), mode="json")


class Known:
    """The journal of a shard, read with today's settings. `archive`: whether its archive is at hand."""

    def __init__(
        self, journal: Journal, settings: ScrapeSettings, blacklist: BlacklistSettings, archive: bool = False
    ) -> None:
        self.journal, self.settings, self.archive = journal, settings, archive
        self._made, self._rules = journal.made, UrlRules(blacklist)
        self._allow_private = blacklist.allow_private_hosts
        self._most_failures = max([settings.host_failures, *(made["host_failures"] for made in journal.all_settings())])

    def record_at(self, position: int) -> int | None:
        """Offset of a page in the archive, or None where that is not at hand or has no such page."""
        return self.journal.archived_at(position) if self.archive else None

    def changed_key(self, position: int) -> str | None:
        """The key that makes another outcome of what a server answered, or None."""
        reason, made = self.journal.reason(position), self.journal.made_with(position)
        if (reason == "ok" or reason.startswith("extract_")) and made["extractors"] != self._made["extractors"]:
            return "extractors"
        if reason == "extract_timeout" and self.record_at(position) is not None:
            # without an archive it is left alone: a time-out is no reason to fetch anything again
            return "extract_timeout" if self.settings.extract_timeout > made["extract_timeout"] else None
        key = _LIMITS.get(reason)
        return key if key and self._made[key] > made[key] else None

    def must_ask_robots(self, position: int) -> bool:
        """Whether a known URL may not be used before its robots.txt was asked."""
        known = bool(self.journal.reason(position))
        return known and self.settings.obey_robots and not self.journal.made_with(position)["obey_robots"]

    def has_outcome(self, position: int) -> bool:
        """Whether the known outcome of a URL is that of today, but for robots.txt."""
        reason = self.journal.reason(position)
        if reason in ("", ARCHIVED, "host_parked"):
            return False
        if (
            (reason in _ROBOTS and not self.settings.obey_robots)
            or (reason == "private_host" and self._allow_private)
            or (reason == "no_contact" and self.settings.contact)
        ):
            return False
        if reason == "redirect_refused":
            target = self.journal.outcome(position).get("refused")
            return target is None or self._rules.reason(target) is not None
        return self.changed_key(position) is None

    def holds(self, position: int) -> bool:
        """Whether nothing is left to do for a URL."""
        return self.has_outcome(position) and not self.must_ask_robots(position)

    def is_settled(self, position: int) -> bool:
        """Whether an earlier run came to an end with a URL, which in the same list is the end."""
        return self.holds(position) or self.journal.reason(position) == "host_parked"

    def is_parked(self, position: int, failures: int) -> bool:
        """Whether a URL is given up after so many failures of its host in a row.

        As in a crawl of this list that starts with nothing. Where scrape.host_failures was another number, a page that
        is known is not given up, and a URL that was given up is not tried.
        """
        limit = self.settings.host_failures
        reason = self.journal.reason(position)
        if reason == "host_parked":
            limit = min(limit, self.journal.made_with(position)["host_failures"])
        elif reason:
            limit = self._most_failures
        return failures >= limit

    def outcome(self, position: int) -> Outcome:
        """The outcome of a known URL by today's limits and rules."""
        outcome = self.journal.outcome(position)
        if "record" not in outcome:
            return outcome
        if outcome.get("size", outcome["bytes"]) > self.settings.max_bytes:
            return {"reason": "too_large"}
        if any(map(self._rules.reason, _requested(outcome)[1:])):
            return {"reason": "redirect_refused"}
        return outcome

    def requested(self, position: int) -> list[str]:
        """A known URL, and those that its redirects led to."""
        return _requested(self.journal.outcome(position))

    def agree(self, positions: Iterable[int], refetch: bool) -> None:
        """Stop where changed keys would fetch pages again that the archive lacks, unless somebody agreed.

        They agree by `refetch`, by deleting OUTPUT.settings.json, or did so in an earlier run, whose settings are
        there. Raises ConfigError.
        """
        agreed = self.journal.agreed_settings()
        counts: Counter[str] = Counter()
        before: dict[str, Any] = {}
        elsewhere = 0
        for position in positions:
            key = self.changed_key(position)
            if key and self.record_at(position) is None:
                if agreed is not None and agreed.get(key) == self._made[key]:
                    continue
                counts[key] += 1
                before.setdefault(key, self.journal.made_with(position)[key])
                elsewhere += self.journal.archived_at(position) is not None
        if counts:
            changes = ", ".join(
                f"scrape.{key} was {_shown(before[key])} and is {_shown(self._made[key])} ({count} URLs)"
                for key, count in counts.items()
            )
            total = counts.total()
            if not refetch and agreed is not None:
                hint = f", {elsewhere} of them are in its archive if you name that by --archive" if elsewhere else ""
                raise ConfigError(
                    f"{self.journal.settings_path}: {changes}: {total} URLs would be fetched again{hint}; set the key "
                    "back, or agree by --refetch or by deleting this file"
                )
            print(f"scrape: {changes}: {total} URLs are fetched again", file=sys.stderr)
        self.journal.agree()


def _requested(outcome: Outcome) -> list[str]:
    final = outcome["record"]["final_url"] if "record" in outcome else outcome["url"]
    return [outcome["url"], *outcome.get("hops", ()), *([final] if final != outcome["url"] else [])]


def _shown(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
