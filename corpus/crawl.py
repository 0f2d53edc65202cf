"""The crawl itself: hosts side by side, the pages of a host in turn, extraction meanwhile, every outcome journalled."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.progress import Meter
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.archive import Archive
from corpus.extract_pool import ExtractPool
from corpus.fetch import Fetcher, Page
from corpus.journal import Journal
from corpus.network import Addresses, PageError
from corpus.urls import UrlRules, document_id

_SYNC_INTERVAL = 1.0  # seconds between two fsyncs of journal and archive
_LOOKUP_THREADS = 64  # a DNS look-up blocks a thread
_HOSTS_PER_SLOT = 16  # hosts under way for each page in hand: most of them wait for their delay


@dataclass(frozen=True)
class Plan:
    """A list of URLs, sorted out before anything is fetched."""

    urls: int
    refused: list[tuple[int, str]]
    """(position, reason) of URLs that the rules drop or that name a page named before."""
    queues: list[list[tuple[int, str]]]
    """(position, URL) of the others, a queue for each host."""


def plan(urls: Sequence[str], settings: ScrapeSettings, blacklist: BlacklistSettings) -> Plan:
    """Sort a list out. Raises ConfigError when a public host would be contacted without a contact."""
    rules, addresses = UrlRules(blacklist), Addresses(settings.resolve)
    refused: list[tuple[int, str]] = []
    queues: dict[str, list[tuple[int, str]]] = defaultdict(list)
    seen: set[str] = set()
    for position, url in enumerate(urls):
        parsed, reason = rules.check(url)
        if parsed is None or reason:
            refused.append((position, reason or "malformed"))
        elif parsed.canonical in seen:
            refused.append((position, "duplicate"))
        elif not settings.contact and addresses.given(parsed.host) is None:
            raise ConfigError(
                f"scrape.contact is empty: set a mail address or page for site owners to scrape {parsed.host}"
            )
        else:
            seen.add(parsed.canonical)
            queues[parsed.host].append((position, url))
    # The longest queues first: their delays, one after the other, decide how long the whole run takes.
    return Plan(len(urls), refused, sorted(queues.values(), key=len, reverse=True))


class Crawl:
    """One scrape under way: hosts side by side, the pages of a host in turn, each outcome into the journal."""

    def __init__(
        self, fetcher: Fetcher, pool: ExtractPool, journal: Journal, archive: Archive | None, meter: Meter
    ) -> None:
        self.fetcher, self.pool, self.journal, self.archive, self.meter = fetcher, pool, journal, archive, meter
        self.reasons: Counter[str] = Counter()

    async def pages(self, queues: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Fetch and extract every (position, URL), one queue a host."""
        active = asyncio.Semaphore(_HOSTS_PER_SLOT * self.fetcher.settings.concurrency)
        syncing = asyncio.create_task(self._sync_now_and_then())
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in queues:
                    await active.acquire()
                    host = tasks.create_task(self._host(queue, tasks))
                    host.add_done_callback(lambda _: active.release())
        finally:
            syncing.cancel()
            with suppress(asyncio.CancelledError):
                await syncing

    async def _host(self, queue: Sequence[tuple[int, str]], tasks: asyncio.TaskGroup) -> None:
        """The pages of one host, one after the other; a page is extracted while the next one is fetched."""
        for position, url in queue:
            try:
                page = await self.fetcher.fetch(url)
            except PageError as error:
                self.settle(position, None, reason=error.reason)
            else:
                tasks.create_task(self._extract(position, url, page))

    async def _extract(self, position: int, url: str, page: Page) -> None:
        """The text of a page, settled; its slot is free again."""
        try:
            found = await self.pool.extract(page.body, page.content_type, page.url)
        except PageError as error:
            self.settle(position, page, reason=error.reason)
        else:
            record = {"id": document_id(url), "url": url, "final_url": page.url, "title": found.title}
            record |= {"text": found.text} | ({"date": found.date} if found.date else {})
            self.settle(position, page, record=record | {"extractor": found.extractor}, bytes=len(page.body))
        finally:
            self.fetcher.slots.release()

    def settle(self, position: int, page: Page | None, **outcome: Any) -> None:
        """Archive a response and journal what became of it, in one go: no page is in one but not in the other."""
        end = self.journal.archive_end
        if self.archive is not None and page is not None:
            end = self.archive.append(page)
        self.journal.append(position, end, **outcome)
        self.reasons[outcome.get("reason", "ok")] += 1
        self.meter.advance(note=", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common(6)))

    async def _sync_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_INTERVAL)
            if self.archive is not None:  # first, because the journal vouches for it
                await asyncio.to_thread(self.archive.sync)
            await asyncio.to_thread(self.journal.sync)


async def crawl(
    planned: Plan,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    journal: Journal,
    archive_path: Path | None,
    workers: int,
) -> None:
    """Settle every URL that the journal lacks."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_LOOKUP_THREADS))
    async with AsyncExitStack() as stack:
        fetcher = Fetcher(settings, UrlRules(blacklist), blacklist.allow_private_hosts)
        await stack.enter_async_context(fetcher)
        pool = await stack.enter_async_context(ExtractPool(settings, workers))
        archive = stack.enter_context(Archive(archive_path, journal.archive_end)) if archive_path else None
        meter = stack.enter_context(Meter("scrape", "pages", total=planned.urls))
        meter.advance(journal.finished)
        run = Crawl(fetcher, pool, journal, archive, meter)
        for position, reason in planned.refused:
            if position not in journal:
                run.settle(position, None, reason=reason)
        await run.pages([[item for item in queue if item[0] not in journal] for queue in planned.queues])
