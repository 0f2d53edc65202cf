"""The outcomes of a scrape, from the network or from WARC files: a shard of pages with rejects, figures per host."""

from base64 import b32encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha1
from itertools import islice
from pathlib import Path
from typing import Any

from common.files import Document, document_writer
from common.settings import ScrapeSettings
from common.stats import Stats
from corpus.extract.pool import extract_in_child
from corpus.runner import ShardStep
from corpus.scrape.response import FetchedPage
from corpus.urls.url import document_id

Outcome = Mapping[str, Any]
"""The result for one URL: `record`, `bytes` (of its decoded body) and `date` (of the fetch), or `reason`."""
_HOSTS = 20  # in the statistics: the largest determine the run time and most of the corpus


def page_outcome(settings: ScrapeSettings, page: FetchedPage) -> Outcome:
    """Extract a page, in a worker process: its record, or the reason why it has none.

    `content_hash` is the SHA-1 of the decoded body in base32, as in WARC files.
    """
    found = extract_in_child(settings, page)
    if isinstance(found, str):
        return {"reason": found}
    record = {
        "id": document_id(page.requested),
        "url": page.requested,
        "final_url": page.url,
        "title": found.title,
        "text": found.text,
        **({"date": found.date} if found.date else {}),
        **({"origin": page.origin} if page.origin else {}),
        "extractor": found.extractor,
        "content_hash": f"sha1:{b32encode(sha1(page.body).digest()).decode()}",
    }
    return {"record": record, "bytes": len(page.body), "date": page.date}


def count_date(stats: Stats, outcome: Outcome) -> None:
    """Count a page in `fetch_dates` of the statistics: first and last day, and pages with a date."""
    if date := outcome.get("date"):  # journals of earlier versions have none
        known = stats.extra.setdefault("fetch_dates", {"first": date, "last": date, "pages": 0})
        known |= {"first": min(known["first"], date), "last": max(known["last"], date), "pages": known["pages"] + 1}


@contextmanager
def outcome_writer(output: Path, step: ShardStep) -> Iterator[Callable[[str, Outcome], None]]:
    """Yield a function that writes a URL and its outcome. The shard and the rejects are written atomically.

    Raises EmptyResultError if no URL has text.
    """
    stats, extractors = step.stats, Counter[str]()
    with step.results(document_writer(output), "pages") as results:

        def write_outcome(url: str, outcome: Outcome) -> None:
            stats.documents_in += 1
            if "reason" in outcome:
                results.drop({"url": url}, outcome["reason"])
            else:
                record: Document = {**outcome["record"], "url": url}  # spelled as in this list
                stats.bytes_in += outcome["bytes"]
                count_date(stats, outcome)
                extractors[record["extractor"]] += 1
                results.keep(record)
            results.meter.advance(1, outcome.get("bytes", 0), stats.dropped())

        yield write_outcome
    stats.extra["extractors"] = dict(sorted(extractors.items()))


def largest_hosts(
    queues: Mapping[str, Sequence[tuple[int, str]]], outcome_of: Callable[[int], Outcome]
) -> dict[str, dict[str, Any]]:
    """`{host: {"urls", "ok", "bytes", "reasons"}}` of the 20 hosts with most URLs, ties in the list's order.

    Bytes are those of the bodies with text. `queues` has (position, URL) by host, the
    longest first; `outcome_of` returns the outcome at a position in the list.
    """
    hosts = {}
    for host, queue in islice(queues.items(), _HOSTS):
        reasons: Counter[str] = Counter()
        size = 0
        for position, _ in queue:
            outcome = outcome_of(position)
            reasons[outcome.get("reason", "ok")] += 1
            size += outcome.get("bytes", 0)
        ok = reasons.pop("ok", 0)
        hosts[host] = {"urls": len(queue), "ok": ok, "bytes": size, "reasons": dict(reasons.most_common())}
    return hosts
