"""The outcomes of earlier runs, and which of them are still valid under today's settings.

There are two kinds of `scrape` keys:

- How a page is fetched (contact, time-outs, delays, retries, …): these never invalidate a page and
  apply to what is still to be fetched. With obey_robots off, this includes the URLs that only
  robots.txt forbade.
- What an outcome depends on (OUTCOME_KEYS): an outcome that would differ now is made again, from
  the archive if it has the response. Otherwise the run stops until the user consents to fetching
  those pages again.

URL rules (`blacklist`) are not part of an outcome: each run applies them to all URLs and redirects.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from common.console import note
from common.errors import ConfigError
from common.settings import ScrapeSettings
from corpus.scrape.archive import Archive
from corpus.scrape.journal import Entry, Journal, OutcomeSettings
from corpus.scrape.opt_outs import ROBOTS_REASONS, TDM_REASONS
from corpus.scrape.pages import Outcome
from corpus.urls.rules import UrlRules

OUTCOME_KEYS = ("extractors", "extract_timeout", "max_bytes", "max_redirects")
"""Keys that the journal stores with every outcome."""
PAGES = frozenset({"ok", "plain"})
"""`OutcomeCache.reason` of a page."""
_OPT_OUTS = "opt_outs"
"""Key of the opt-out directives that pages were checked for; absent while opt-outs are ignored."""
_ROBOTS = frozenset({"robots", "robots_unreachable", "crawl_delay"})
# failures that a larger value of a key may turn into pages
_LIMITS = {"too_large": "max_bytes", "too_many_redirects": "max_redirects", "extract_timeout": "extract_timeout"}


def outcome_settings(settings: ScrapeSettings) -> OutcomeSettings:
    """Today's settings as the journal stores them."""
    obeyed = {_OPT_OUTS: sorted(settings.opt_out_directives)} if settings.opt_outs == "obey" else {}
    return settings.model_dump(include=set(OUTCOME_KEYS), mode="json") | obeyed


class OutcomeCache:
    """The journal and the archive of a shard under today's settings.

    A position is that of a URL in `keys`, their `key_of`.
    """

    def __init__(
        self,
        journal: Journal,
        keys: Sequence[str],
        settings: ScrapeSettings,
        rules: UrlRules,
        archive: Archive | None = None,
    ) -> None:
        self.journal, self.settings, self.archive = journal, settings, archive
        self._keys, self._rules = keys, rules

    def known(self, position: int) -> Entry:
        """The last line of the journal about a URL; empty if there is none."""
        return self.journal.known.get(self._keys[position], {})

    def reason(self, position: int) -> str:
        """`ok` for a page (`plain` for plain text), a failure's reason, "" for an unknown URL."""
        entry = self.known(position)
        if "record" in entry:
            return "plain" if entry["record"]["extractor"] == "plain" else "ok"
        return str(entry.get("reason", ""))

    def in_archive(self, position: int) -> bool:
        """Whether the archive is open and has the response of a URL."""
        return self.archive is not None and self._keys[position] in self.archive.responses

    def stale_key(self, position: int) -> str | None:
        """The changed key that makes an outcome invalid, or None."""
        entry, reason = self.known(position), self.reason(position)
        if not entry:
            return None
        then, today = entry["settings"], self.journal.settings
        checked, checking = then.get(_OPT_OUTS), today.get(_OPT_OUTS)
        if (
            (reason in PAGES and checking is not None and (checked is None or set(checking) - set(checked)))
            or (reason in ROBOTS_REASONS and set(checked or ()) - set(checking or ()))
            or (reason in TDM_REASONS and checking is None)
        ):
            return _OPT_OUTS
        if (reason == "ok" or reason.startswith("extract_")) and then["extractors"] != today["extractors"]:
            return "extractors"
        key = _LIMITS.get(reason)
        return key if key is not None and bool(today[key] > then[key]) else None

    def is_valid(self, position: int) -> bool:
        """Whether the known outcome of a URL can be used without a request."""
        entry, reason = self.known(position), self.reason(position)
        if (
            reason in ("", "host_parked")
            or (reason in _ROBOTS and not self.settings.obey_robots)
            or (reason == "private_host" and self._rules.allow_private)
            or (reason == "no_contact" and self.settings.contact)
        ):
            return False
        if reason == "redirect_refused":
            target = entry.get("refused")
            return target is None or self._rules.reason(target) is not None
        return self.stale_key(position) is None

    def is_done(self, position: int) -> bool:
        """Whether an earlier run finished a URL, including those of parked hosts."""
        return self.is_valid(position) or self.reason(position) == "host_parked"

    def outcome(self, position: int) -> Outcome:
        """The outcome of a known URL under today's limits and rules."""
        outcome = self.known(position)
        assert outcome, "every URL has an outcome after a crawl"
        if "record" not in outcome:
            return outcome
        if max(outcome.get("size") or 0, outcome["bytes"]) > self.settings.max_bytes:
            return {"reason": "too_large"}
        redirects = {*outcome.get("hops", ()), outcome["record"]["final_url"]} - {self._keys[position]}
        return {"reason": "redirect_refused"} if any(map(self._rules.reason, redirects)) else outcome

    def pages_outside_archive(self, positions: Iterable[int]) -> int:
        """How many of these URLs have a page that is not in the archive."""
        reasons = (self.reason(position) for position in positions if not self.in_archive(position))
        return sum(reason in PAGES or reason.startswith("extract_") for reason in reasons)

    def confirm_refetch(self, positions: Iterable[int], refetch: bool) -> None:
        """Raise ConfigError if changed keys would refetch pages that the archive lacks.

        The user consents by `refetch`, or by deleting OUTPUT.settings.json, which then records the
        consent for later runs.
        """
        accepted, today = self.journal.accepted_settings(), self.journal.settings
        counts: Counter[str] = Counter()
        before: dict[str, Any] = {}
        for position in positions:
            key = self.stale_key(position)
            if key is None or self.in_archive(position):
                continue
            if accepted is None or accepted.get(key) != today.get(key):
                counts[key] += 1
                before.setdefault(key, self.known(position)["settings"].get(key))
        if counts:
            changes = ", ".join(
                f"scrape.{key} was {_shown(before[key])} and is {_shown(today.get(key))} ({count} URLs)"
                for key, count in counts.items()
            )
            total = counts.total()
            if not refetch and accepted is not None:
                raise ConfigError(
                    f"{self.journal.settings_path}: {changes}: {total} URLs would be fetched again; set the key back, "
                    "name an archive that has them by --archive, or agree by --refetch or by deleting this file"
                )
            note(f"{changes}: {total} URLs are fetched again")
        self.journal.accept_settings()


def _shown(value: object) -> str:
    if value is None:
        return "ignore"  # opt_outs, the only key that an outcome may lack
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
