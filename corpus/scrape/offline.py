"""Extract the pages of WARC files: `python -m corpus.scrape --warc FILE... --output FILE`."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Unpack

import numpy as np

from common.errors import EmptyResultError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from common.workers import Workers
from corpus.runner import ShardStep, StepOptions
from corpus.scrape.archive import read_pages
from corpus.scrape.pages import Outcome, outcome_writer, page_outcome
from corpus.scrape.response import FetchedPage
from corpus.scrape.warc import read_records
from corpus.urls.rules import SeenUrls, UrlRules, hash64

_PAGES_PER_WORKER = 4  # in memory: one is being extracted, the others wait
_MAX_WAITING = 1024  # outcomes that wait for a slower page before them


def checked_pages(
    paths: Iterable[Path], settings: ScrapeSettings, blacklist: BlacklistSettings, texts: bool = False
) -> Iterator[tuple[str, FetchedPage | Outcome]]:
    """Yield the URL of every response in order, and its page or the first reason to drop it.

    The first of several pages with equal URLs is kept; this takes 8 bytes of memory per URL. With
    `texts`, the documents of WET files are yielded, too.
    """
    rules, seen = UrlRules(blacklist), SeenUrls()
    for path in paths:
        for url, page in read_pages(path, settings.max_bytes, texts):
            if isinstance(page, FetchedPage):
                page = _drop_reason(page, rules, seen) or page
            yield url, {"reason": page} if isinstance(page, str) else page


def _drop_reason(page: FetchedPage, rules: UrlRules, seen: SeenUrls) -> str | None:
    """Why a crawl would not have fetched a page, or None; then its URL is added to `seen`."""
    parsed, reason = rules.check(page.requested)
    if parsed is None or reason:
        return reason or "malformed"
    if page.url != page.requested and rules.reason(page.url):
        return "redirect_refused"
    return None if seen.add(np.array([hash64(parsed.canonical)], dtype=np.uint64))[0] else "duplicate"


def extracted(
    pages: Iterable[tuple[str, FetchedPage | Outcome]], settings: ScrapeSettings, workers: int
) -> Iterator[tuple[str, Outcome]]:
    """Yield each URL and its outcome, in order, while worker processes extract later pages."""
    slots = Semaphore(_PAGES_PER_WORKER * workers)
    waiting: deque[tuple[str, Future[Outcome]]] = deque()
    extract = partial(page_outcome, settings)
    with Workers(workers) as pool:
        pool.start()
        for url, page in pages:
            if isinstance(page, FetchedPage):
                slots.acquire()
                outcome = pool.submit(extract, page)
                outcome.add_done_callback(lambda _: slots.release())
            else:
                outcome = Future()
                outcome.set_result(page)
            waiting.append((url, outcome))
            while waiting and (waiting[0][1].done() or len(waiting) > _MAX_WAITING):
                url, outcome = waiting.popleft()
                yield url, outcome.result()
        for url, outcome in waiting:
            yield url, outcome.result()


def extract_archives(
    paths: Sequence[Path],
    output: Path,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    **options: Unpack[StepOptions],
) -> Stats:
    """Extract the pages of WARC files into the shard `output`, in the order of the files.

    Raises InputError for a file that is not WARC, EmptyResultError if no page has text.
    """
    step = ShardStep("scrape", **options | {"max_bad_share": None}, unit="URLs")
    try:
        with outcome_writer(output, step) as write:
            for url, outcome in extracted(checked_pages(paths, settings, blacklist), settings, step.workers):
                write(url, outcome)
    except EmptyResultError as error:
        cause = str(error)
        if not step.stats.documents_in:
            with paths[0].open("rb") as file:
                kinds = {str(kind) for _, _, kind in read_records(file, paths[0], lambda record: record.rec_type)}
            others = f"no response records inside, but {', '.join(sorted(kinds))}; corpus.ingest reads WET files"
            cause = others if kinds else "no record inside; fetch it again, or leave it out"
        raise EmptyResultError(f"{paths[0]}{' …' if len(paths) > 1 else ''}: {cause}") from None
    return step.stats
