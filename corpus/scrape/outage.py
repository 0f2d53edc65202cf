"""Distinguish dead hosts from a dead network: a failure counts only if another host responds after it."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import OutageError
from corpus.scrape.fetch import Fetcher
from corpus.scrape.network import NO_RESPONSE
from corpus.urls.hosts import registered_domain
from corpus.urls.url import parse_url

_PROBED_SITES = 3
# reasons after which it is unknown whether the host ever responded
_NO_EVIDENCE = NO_RESPONSE | {
    "",
    "robots_unreachable",
    "tdmrep_unreachable",
    "host_parked",
    "no_contact",
    "bad_url",
    "unexpected",
}


@dataclass(frozen=True)
class Failure:
    """A URL without a response."""

    response_count: int
    """Responses before it, from any host."""
    url: str
    outcome: dict[str, Any]


class UnconfirmedFailures:
    """Failures without a response, deferred until another host responds."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._failures: deque[Failure] = deque()

    def hold(self, url: str, outcome: dict[str, Any]) -> None:
        """Add a failure."""
        self._failures.append(Failure(self._fetcher.response_count, url, outcome))

    def pop_confirmed(self) -> Iterator[Failure]:
        """Remove and yield the failures that happened before the last response: the network was up."""
        while self._failures and self._failures[0].response_count < self._fetcher.response_count:
            yield self._failures.popleft()

    async def rest(
        self, queues: Sequence[Sequence[tuple[int, str]]], reason: Callable[[int], str]
    ) -> Sequence[Failure]:
        """The failures after the last response, at the end of a crawl. Raises OutageError if the network seems down.

        Up to three sites that responded before, in this run or an earlier one, are probed by their robots.txt; one
        response proves that the network is up. If no site ever responded, it is an outage.
        """
        if not self._failures:
            return ()
        silent = {_site(failure.url) for failure in self._failures}
        responsive: dict[str, str] = {}
        for queue in queues:
            url = next((url for position, url in queue if reason(position) not in _NO_EVIDENCE), None)
            if url is not None:
                responsive.setdefault(_site(url), url)
        probed = sorted(responsive, key=silent.__contains__)[:_PROBED_SITES]  # first those without failures
        for site in probed:
            if await self._fetcher.probe(responsive[site]):
                return self._failures  # `pop_confirmed` may have taken some during the probe
        reasons = Counter(failure.outcome["reason"] for failure in self._failures)
        also = f", nor {len(probed)} that answered before" if probed else ""
        raise OutageError(
            f"no host answered: {len(self._failures)} URLs of {len(silent)} sites failed "
            f"({', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}){also}; "
            "this is not recorded, and known outcomes are kept: check the network and run it again, or remove the URLs "
            "of dead sites from the list"
        )


def _site(url: str) -> str:
    """The registered domain of a URL."""
    return registered_domain(parse_url(url).host)
