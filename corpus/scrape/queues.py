"""A list of URLs, sorted out before anything is fetched: what the rules refuse, and the others by host."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.settings import BlacklistSettings
from corpus.scrape.known import Known
from corpus.scrape.network import Addresses
from corpus.urls.rules import UrlRules


@dataclass(frozen=True)
class Plan:
    """A list of URLs, sorted out before anything is fetched."""

    keys: list[str]
    """The form in which each URL is requested; "" for those that are refused."""
    refused: dict[int, str]
    """The reason by position of URLs that the rules drop or that name a page named before."""
    queues: dict[str, list[tuple[int, str]]]
    """(position, URL) of the others by host, the longest queue first."""

    def positions(self) -> Iterator[int]:
        """Positions of all URLs that are not refused."""
        return (position for queue in self.queues.values() for position, _ in queue)


def plan(urls: Sequence[str], blacklist: BlacklistSettings) -> Plan:
    """Sort a list out."""
    rules = UrlRules(blacklist)
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
    # The longest queues first: their delays, one after the other, decide how long the whole run takes.
    return Plan(keys, refused, dict(sorted(queues.items(), key=lambda item: len(item[1]), reverse=True)))


def check_contact(planned: Plan, known: Known) -> None:
    """Raise ConfigError when a public host would be asked for a page without a contact."""
    addresses = Addresses(known.settings.resolve)
    for host, queue in planned.queues.items():
        if known.settings.contact or addresses.given(host) is not None:
            continue
        if any(known.record_at(position) is None and not known.is_settled(position) for position, _ in queue):
            raise ConfigError(f"scrape.contact is empty: set a mail address or page for site owners to scrape {host}")
