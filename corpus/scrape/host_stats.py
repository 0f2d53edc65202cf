"""Statistics of the largest hosts of a crawl, which determine its run time and most of the corpus."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from corpus.scrape.pages import Outcome
from corpus.scrape.queues import CrawlQueues

_HOSTS = 20


def largest_hosts(queues: CrawlQueues, outcome_of: Callable[[int], Outcome]) -> dict[str, dict[str, Any]]:
    """`{host: {"urls", "ok", "bytes", "reasons"}}` of the 20 hosts with most URLs, ties in the list's order.

    Bytes are those of the bodies with text. `outcome_of` returns the outcome at a position in the list.
    """
    hosts = {}
    for host, queue in islice(queues.queues.items(), _HOSTS):
        reasons: Counter[str] = Counter()
        size = 0
        for position, _ in queue:
            outcome = outcome_of(position)
            reasons[outcome.get("reason", "ok")] += 1
            size += outcome.get("bytes", 0)
        ok = reasons.pop("ok", 0)
        hosts[host] = {"urls": len(queue), "ok": ok, "bytes": size, "reasons": dict(reasons.most_common())}
    return hosts


def table(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """The result of `largest_hosts` as a table, one line per host."""
    title = "largest hosts"
    width = max(map(len, (title, *hosts)))
    lines = [f"{title:{width}} {'URLs':>7} {'ok':>7} {'MB':>8}  failed"]
    for host, counts in hosts.items():
        failed = ", ".join(f"{count} {reason}" for reason, count in counts["reasons"].items())
        lines.append(
            f"{host:{width}} {counts['urls']:7} {counts['ok']:7} {counts['bytes'] / 1e6:8.2f}  {failed}".rstrip()
        )
    return "\n".join(lines)
