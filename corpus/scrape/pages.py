"""The shard of pages that a scrape ends in, whether they came from the network or from WARC files."""

from base64 import b32encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

from common.files import Document, document_writer
from common.stats import Stats
from corpus.extract.extractors import Extracted
from corpus.runner import Step
from corpus.scrape.fetch import Page
from corpus.urls.rules import document_id

Outcome = Mapping[str, Any]
"""What became of a URL: `record` and `bytes` (of its decoded body), or `reason`."""


def page_outcome(page: Page, found: Extracted) -> Outcome:
    """The outcome of a page with text. `content_hash` names the decoded body in WARC's way: SHA-1 in base32."""
    record = {
        "id": document_id(page.requested),
        "url": page.requested,
        "final_url": page.url,
        "title": found.title,
        "text": found.text,
        **({"date": found.date} if found.date else {}),
        "extractor": found.extractor,
        "content_hash": f"sha1:{b32encode(sha1(page.body).digest()).decode()}",
    }
    return {"record": record, "bytes": len(page.body)}


@contextmanager
def outcome_writer(
    output: Path, rejects: Path | None, stats: Stats, allow_empty: bool
) -> Iterator[Callable[[str, Outcome], None]]:
    """Yield a function that takes each URL and its outcome; shard and rejects appear whole or not at all.

    Raises EmptyResultError if no URL had text.
    """
    extractors: Counter[str] = Counter()
    step = Step(stats.step, (), rejects, allow_empty=allow_empty, unit="URLs")
    step.stats = stats
    with step.results(document_writer(output), "pages") as results:

        def settle(url: str, outcome: Outcome) -> None:
            stats.documents_in += 1
            if "reason" in outcome:
                results.drop({"url": url}, outcome["reason"])
            else:
                record: Document = {**outcome["record"], "url": url}  # as this list spells it
                stats.bytes_in += outcome["bytes"]
                extractors[record["extractor"]] += 1
                results.keep(record)
            results.meter.advance(1, outcome.get("bytes", 0), stats.dropped())

        yield settle
    stats.extra["extractors"] = dict(sorted(extractors.items()))
