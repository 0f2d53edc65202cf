"""Extract the pages of WARC files without a network: `python -m corpus.scrape --warc FILE... --output FILE`."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from common.errors import EmptyResultError, PageError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.extract.pool import ExtractPool
from corpus.runner import ShardStep, StepOptions
from corpus.scrape.opt_outs import judged_by_headers
from corpus.scrape.pages import Outcome, outcome_writer, page_outcome
from corpus.scrape.response import FetchedPage
from corpus.scrape.warc import read_pages, read_records
from corpus.urls.rules import SeenUrls, UrlRules, hash64

_PAGES_PER_WORKER = 4  # in memory: one is being extracted, the others wait
_MAX_WAITING = 1024  # outcomes that wait for a slower page before them


def checked_pages(
    paths: Iterable[Path], settings: ScrapeSettings, blacklist: BlacklistSettings, texts: bool = False
) -> Iterator[tuple[str, FetchedPage | Outcome]]:
    """Yield every response of the files in order: its URL, and its page or the first reason to drop it.

    The first of several pages with equal URLs is kept; this takes 8 bytes of memory per URL. With `texts`, the
    documents of WET files are yielded as well, as they are.
    """
    rules, seen = UrlRules(blacklist), SeenUrls()
    for path in paths:
        for url, page in read_pages(path, settings.max_bytes, texts):
            if isinstance(page, FetchedPage):
                page = _drop_reason(page, rules, seen) or page
            yield url, {"reason": page} if isinstance(page, str) else page


def _drop_reason(page: FetchedPage, rules: UrlRules, seen: SeenUrls) -> str | None:
    """Why a crawl would not have fetched a page, or None, in which case its URL is added to `seen`."""
    parsed, reason = rules.check(page.requested)
    if parsed is None or reason:
        return reason or "malformed"
    if page.url != page.requested and rules.reason(page.url):
        return "redirect_refused"
    return None if seen.add(np.array([hash64(parsed.canonical)], dtype=np.uint64))[0] else "duplicate"


async def _extract_all(
    pages: Iterable[tuple[str, FetchedPage | Outcome]], settings: ScrapeSettings, workers: int
) -> AsyncGenerator[tuple[str, Outcome], None]:
    """Each URL and its outcome, in order, while later pages are extracted."""
    slots = asyncio.Semaphore(_PAGES_PER_WORKER * workers)
    waiting: deque[tuple[str, asyncio.Task[Outcome]]] = deque()

    async def extract(page: FetchedPage | Outcome) -> Outcome:
        try:
            if not isinstance(page, FetchedPage):
                return page
            if settings.opt_outs == "obey":
                page = judged_by_headers(page, settings)
            found = await pool.extract(page.body, page.content_type, page.url, page.reserved_by or "")
            return page_outcome(page, found)
        except PageError as error:
            return {"reason": error.reason}
        finally:
            slots.release()

    async with ExtractPool(settings, workers) as pool:
        try:
            for url, page in pages:
                await slots.acquire()
                waiting.append((url, asyncio.create_task(extract(page))))
                while waiting and (waiting[0][1].done() or len(waiting) > _MAX_WAITING):
                    yield waiting[0][0], await waiting[0][1]
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], await waiting[0][1]
                waiting.popleft()
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


def extracted(
    pages: Iterable[tuple[str, FetchedPage | Outcome]], settings: ScrapeSettings, workers: int
) -> Iterator[tuple[str, Outcome]]:
    """Yield each URL and its outcome, in order, while worker processes extract later pages."""
    outcomes = _extract_all(pages, settings, workers)

    async def following() -> tuple[str, Outcome] | None:
        return await anext(outcomes, None)

    with asyncio.Runner() as runner:
        try:
            while (found := runner.run(following())) is not None:
                yield found
        finally:
            runner.run(outcomes.aclose())


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
            cause = f"no response records inside, but {', '.join(sorted(kinds))}; corpus.ingest reads WET files"
        raise EmptyResultError(f"{paths[0]}{' …' if len(paths) > 1 else ''}: {cause}") from None
    return step.stats
