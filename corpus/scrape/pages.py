"""The outcomes of a scrape, from the network or WARC files: shard, rejects, figures per host."""

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
"""Of a URL: `record`, `bytes` (of its decoded body) and `date` (of the fetch), or `reason`."""
_HOSTS = 20  # in the statistics: the largest determine the run time and most of the corpus


def page_outcome(settings: ScrapeSettings, page: FetchedPage) -> Outcome:
    """Extract a page, in a worker process: its record, or the reason why it has none.

    `content_hash` is the SHA-1 of the decoded body in base32, as in WARC files.
    """
    extracted = extract_in_child(settings, page)
    if isinstance(extracted, str):
        return {"reason": extracted}
    record = {
        "id": document_id(page.requested),
        "url": page.requested,
        "final_url": page.url,
        "title": extracted.title,
        "text": extracted.text,
        **({"date": extracted.date} if extracted.date else {}),
        **({"origin": page.origin} if page.origin else {}),
        "extractor": extracted.extractor,
        "content_hash": f"sha1:{b32encode(sha1(page.body).digest()).decode()}",
    }
    return {"record": record, "bytes": len(page.body), "date": page.date}


def count_date(stats: Stats, outcome: Outcome) -> None:
    """Count a page in `fetch_dates` of the statistics: first and last day, pages with a date."""
    if date := outcome.get("date"):  # journals of earlier versions have none
        known = stats.extra.setdefault("fetch_dates", {"first": date, "last": date, "pages": 0})
        known |= {"first": min(known["first"], date), "last": max(known["last"], date), "pages": known["pages"] + 1}


@contextmanager
def outcome_writer(output: Path, step: ShardStep) -> Iterator[Callable[[str, Outcome], None]]:
    """Yield a function that writes a URL and its outcome. All files are written atomically.

    Raises EmptyResultError if no URL has text.
    """
    stats = step.stats
    with step.results(document_writer(output), "pages") as results:

        def write_outcome(url: str, outcome: Outcome) -> None:
            stats.documents_in += 1
            if "reason" in outcome:
                results.drop({"url": url}, outcome["reason"])
            else:
                record: Document = {**outcome["record"], "url": url}  # spelled as in this list
                stats.bytes_in += outcome["bytes"]
                count_date(stats, outcome)
                results.keep(record)
            results.meter.advance(1, outcome.get("bytes", 0), stats.dropped())

        yield write_outcome


def largest_hosts(
    queues: Mapping[str, Sequence[tuple[int, str]]], outcome_of: Callable[[int], Outcome]
) -> dict[str, dict[str, Any]]:
    """`{host: {"urls", "ok", "bytes", "reasons"}}` of the 20 hosts with most URLs.

    Bytes are those of the bodies with text. `queues` has (position, URL) by host, the longest
    first; `outcome_of` returns the outcome at a position.
    """
    hosts = {}
    for host, queue in islice(queues.items(), _HOSTS):
        outcomes = [outcome_of(position) for position, _ in queue]
        reasons = Counter(outcome.get("reason", "ok") for outcome in outcomes)
        size = sum(outcome.get("bytes", 0) for outcome in outcomes)
        ok = reasons.pop("ok", 0)
        hosts[host] = {"urls": len(queue), "ok": ok, "bytes": size, "reasons": dict(reasons.most_common())}
    return hosts
