"""The pages of WARC files, extracted without a network: `python -m corpus.scrape --warc FILE... --output FILE`."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from common.errors import EmptyResultError, PageError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.extract.pool import ExtractPool
from corpus.scrape.archive import read_pages
from corpus.scrape.fetch import Page
from corpus.scrape.pages import Outcome, outcome_writer, page_outcome
from corpus.urls.rules import UrlRules
from corpus.urls.seen import Seen

_PAGES_PER_WORKER = 4  # in memory: one is extracted, the others are at hand
_TEXTS = 1024  # that wait for a slower page before them


def candidates(
    paths: Iterable[Path], settings: ScrapeSettings, blacklist: BlacklistSettings
) -> Iterator[tuple[str, Page | str]]:
    """Every response of the files, in order: its URL, and the page or the first reason to drop it.

    Of pages with equal URLs the first is kept; 8 bytes of each are remembered.
    """
    rules, seen = UrlRules(blacklist), Seen()
    for path in paths:
        for url, page in read_pages(path, settings.max_bytes):
            yield url, page if isinstance(page, str) else _reason(page, rules, seen) or page


def _reason(page: Page, rules: UrlRules, seen: Seen) -> str | None:
    """Why a crawl would not have come to a page, or None."""
    parsed, reason = rules.check(page.requested)
    if parsed is None or reason:
        return reason or "malformed"
    if page.url != page.requested and rules.reason(page.url):
        return "redirect_refused"
    key = xxhash.xxh3_64_intdigest(parsed.canonical.encode())
    return None if seen.first(np.array([key], dtype=np.uint64))[0] else "duplicate"


async def _settle_all(
    pages: Iterable[tuple[str, Page | str]],
    settings: ScrapeSettings,
    workers: int,
    settle: Callable[[str, Outcome], None],
) -> None:
    """Call `settle` with each URL and its outcome, in order, while the pages behind it are extracted."""
    slots = asyncio.Semaphore(_PAGES_PER_WORKER * workers)
    waiting: deque[tuple[str, asyncio.Task[Outcome]]] = deque()

    async def extract(page: Page | str) -> Outcome:
        try:
            if isinstance(page, str):
                return {"reason": page}
            return page_outcome(page, await pool.extract(page.body, page.content_type, page.url))
        except PageError as error:
            return {"reason": error.reason}
        finally:
            slots.release()

    async def settle_first() -> None:
        url, task = waiting[0]
        settle(url, await task)
        waiting.popleft()

    async with ExtractPool(settings, workers) as pool:
        try:
            for url, page in pages:
                await slots.acquire()
                waiting.append((url, asyncio.create_task(extract(page))))
                while waiting and (waiting[0][1].done() or len(waiting) > _TEXTS):
                    await settle_first()
            while waiting:
                await settle_first()
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


def extract_archives(
    paths: Sequence[Path],
    output: Path,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    *,
    rejects: Path | None = None,
    workers: int = 1,
    allow_empty: bool = False,
) -> Stats:
    """Extract the pages of WARC files into the shard `output`, in the order of the files.

    Raises InputError for a file that is no WARC, EmptyResultError when not one page has text.
    """
    stats = Stats("scrape")
    try:
        with outcome_writer(output, rejects, stats, allow_empty) as settle:
            asyncio.run(_settle_all(candidates(paths, settings, blacklist), settings, workers, settle))
    except EmptyResultError as error:
        cause = str(error) if stats.documents_in else "no response records inside; are these WET or WAT files?"
        raise EmptyResultError(f"{paths[0]}{' …' if len(paths) > 1 else ''}: {cause}") from None
    return stats
