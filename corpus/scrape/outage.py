"""Tell a dead network from dead hosts at the end of a crawl."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.errors import OutageError
from corpus.scrape.fetch import Fetcher
from corpus.scrape.network import NO_RESPONSE
from corpus.urls.hosts import registered_domain
from corpus.urls.url import parse_url

_PROBED_SITES = 3
# after these reasons it is unknown whether the host ever responded
_NO_EVIDENCE = NO_RESPONSE | {
    *("", "robots_unreachable", "tdmrep_unreachable", "host_parked", "no_contact", "bad_url", "unexpected")
}


async def require_network(
    fetcher: Fetcher,
    failures: Mapping[str, str],
    queues: Iterable[Sequence[tuple[int, str]]],
    reason: Callable[[int], str],
) -> None:
    """Raise OutageError if the network seems down. `failures`: reasons of URLs without a response.

    Up to three sites that responded before, in this run or an earlier one, are probed by their
    robots.txt; one response proves that the network is up. If no site ever responded, it is down.
    `queues` has all (position, URL); `reason` returns the outcome at a position.
    """
    silent = set(map(_site, failures))
    responsive: dict[str, str] = {}
    for queue in queues:
        url = next((url for position, url in queue if reason(position) not in _NO_EVIDENCE), None)
        if url is not None:
            responsive.setdefault(_site(url), url)
    probed = sorted(responsive, key=silent.__contains__)[:_PROBED_SITES]  # first those without failures
    for site in probed:
        if await fetcher.probe(responsive[site]):
            return
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(failures.values()).most_common())
    also = f", nor {len(probed)} that answered before" if probed else ""
    raise OutageError(
        f"no host answered: {len(failures)} URLs of {len(silent)} sites failed ({reasons}){also}; "
        "this is not recorded, and known outcomes are kept: check the network and run it again, or remove the URLs "
        "of dead sites from the list"
    )


def _site(url: str) -> str:
    """The registered domain of a URL."""
    return registered_domain(parse_url(url).host)
