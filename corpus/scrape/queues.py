"""Sort a URL list for a crawl: the URLs that the rules refuse, and one queue per host for the others."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from corpus.scrape.network import AddressOverrides
from corpus.scrape.outcome_cache import OutcomeCache
from corpus.urls.rules import UrlRules


@dataclass(frozen=True)
class CrawlQueues:
    """A URL list, sorted for a crawl."""

    keys: list[str]
    """The form in which each URL is requested; "" for refused URLs."""
    refused: dict[int, str]
    """The reason, by position, of URLs that the rules drop or that repeat an earlier page."""
    queues: dict[str, list[tuple[int, str]]]
    """(position, URL) of the others by host, the longest queue first."""

    def positions(self) -> Iterator[int]:
        """Positions of all URLs that are not refused."""
        return (position for queue in self.queues.values() for position, _ in queue)


def sort_into_queues(urls: Sequence[str], rules: UrlRules) -> CrawlQueues:
    """Apply the URL rules, drop duplicates, and group the URLs by host."""
    keys: list[str] = []
    refused: dict[int, str] = {}
    queues: dict[str, list[tuple[int, str]]] = defaultdict(list)
    seen: set[str] = set()
    for position, url in enumerate(urls):
        parsed, reason = rules.check(url)
        if parsed is None or reason:
            refused[position] = reason or "malformed"
        elif parsed.canonical in seen:
            refused[position] = "duplicate"
        else:
            seen.add(parsed.canonical)
            queues[parsed.host].append((position, url))
        keys.append("" if position in refused or parsed is None else parsed.text)
    # longest first: a host's delays add up, so the longest queue determines the run time
    return CrawlQueues(keys, refused, dict(sorted(queues.items(), key=lambda item: len(item[1]), reverse=True)))


def require_contact(queues: CrawlQueues, cache: OutcomeCache) -> None:
    """Raise ConfigError if a public host would be contacted without scrape.contact."""
    addresses = AddressOverrides(cache.settings.resolve)
    for host, queue in queues.queues.items():
        if cache.settings.contact or addresses.get(host) is not None:
            continue
        if any(cache.archive_offset(position) is None and not cache.is_done(position) for position, _ in queue):
            raise ConfigError(f"scrape.contact is empty: set a mail address or page for site owners to scrape {host}")
