"""Statistics of the largest hosts of a crawl, which determine its run time and most of the corpus."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from common.tables import text_table
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
    rows: list[tuple[object, ...]] = [("largest hosts", "URLs", "ok", "MB", "failed")]
    for host, counts in hosts.items():
        failed = ", ".join(f"{count} {reason}" for reason, count in counts["reasons"].items())
        rows.append((host, counts["urls"], counts["ok"], f"{counts['bytes'] / 1e6:.2f}", failed))
    return text_table(rows, "lrrrl")
