"""The crawl itself: hosts side by side, the pages of a host in turn, extraction meanwhile, every outcome journalled."""

import asyncio
import resource
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
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
from corpus.pages import page_outcome
from corpus.urls import UrlRules

_SYNC_INTERVAL = 1.0  # seconds between two fsyncs of journal and archive
_HOSTS_UNDER_WAY = 4096  # most of them wait for their delay; a task takes 3 KB


@dataclass(frozen=True)
class Plan:
    """A list of URLs, sorted out before anything is fetched."""

    urls: int
    refused: list[tuple[int, str]]
    """(position, reason) of URLs that the rules drop or that name a page named before."""
    queues: dict[str, list[tuple[int, str]]]
    """(position, URL) of the others by host, the longest queue first."""


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
    return Plan(len(urls), refused, dict(sorted(queues.items(), key=lambda item: len(item[1]), reverse=True)))


class Crawl:
    """One scrape under way: hosts side by side, the pages of a host in turn, each outcome into the journal."""

    def __init__(
        self, fetcher: Fetcher, pool: ExtractPool, journal: Journal, archive: Archive | None, meter: Meter
    ) -> None:
        self.fetcher, self.pool, self.journal, self.archive, self.meter = fetcher, pool, journal, archive, meter
        self.reasons: Counter[str] = Counter()

    async def pages(self, queues: Iterable[Sequence[tuple[int, str]]]) -> None:
        """Fetch and extract every (position, URL) that the journal lacks, one queue a host."""
        active = asyncio.Semaphore(_HOSTS_UNDER_WAY)
        try:
            async with asyncio.TaskGroup() as watch:
                tending = watch.create_task(self._tend())
                async with asyncio.TaskGroup() as tasks:
                    for queue in queues:
                        await active.acquire()
                        host = tasks.create_task(self._host(queue, tasks))
                        host.add_done_callback(lambda _: active.release())
                tending.cancel()
        finally:
            self._sync()

    async def _host(self, queue: Sequence[tuple[int, str]], tasks: asyncio.TaskGroup) -> None:
        """The pages of one host, one after the other; a page is extracted while the next one is fetched.

        After too many failures in a row the host is parked. They are counted in the list's order and also over
        what an earlier run settled, so that a run that was killed parks a host at the same URL.
        """
        failures = 0
        for position, url in queue:
            if position in self.journal:
                failures = failures + 1 if self.journal.host_failed(position) else 0
                continue
            try:
                if failures >= self.fetcher.settings.host_failures:
                    raise PageError("host_parked")
                page = await self.fetcher.fetch(url)
            except PageError as error:
                failures = failures + 1 if error.host_failed else 0
                self.settle(position, None, reason=error.reason, **({"host_failed": True} if error.host_failed else {}))
                await asyncio.sleep(0)  # failures without a request come by the thousand: the others are due, too
            else:
                failures = 0
                tasks.create_task(self._extract(position, page))

    async def _extract(self, position: int, page: Page) -> None:
        """The text of a page, settled; its slot is free again."""
        try:
            found = await self.pool.extract(page.body, page.content_type, page.url)
        except PageError as error:
            self.settle(position, page, reason=error.reason)
        else:
            self.settle(position, page, **page_outcome(page, found))
        finally:
            self.fetcher.slots.release()

    def settle(self, position: int, page: Page | None, **outcome: Any) -> None:
        """Archive a response and journal what became of it, in one go: no page is in one but not in the other."""
        end = self.journal.archive_end
        if self.archive is not None and page is not None:
            end = self.archive.append(page)
        self.journal.append(position, end, **outcome)
        self.reasons[outcome.get("reason", "ok")] += 1
        self.meter.advance(size=len(page.raw) if page is not None else 0)

    async def _tend(self) -> None:
        """Every second: outcomes onto the disk, counts to whoever watches, also while nothing comes in."""
        while True:
            await asyncio.sleep(_SYNC_INTERVAL)
            await asyncio.to_thread(self._sync)
            counts = [f"{count} {reason}" for reason, count in self.reasons.most_common(6)]
            self.meter.advance(0, note=", ".join(counts))

    def _sync(self) -> None:
        if self.archive is not None:  # first, because the journal vouches for it
            self.archive.sync()
        self.journal.sync()


async def crawl(
    planned: Plan,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    journal: Journal,
    archive_path: Path | None,
    workers: int,
) -> None:
    """Settle every URL that the journal lacks. SIGTERM cancels it, with every outcome on the disk."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # idle connections outnumber the usual 1,024
    async with AsyncExitStack() as stack:
        fetcher = Fetcher(settings, UrlRules(blacklist), blacklist.allow_private_hosts)
        await stack.enter_async_context(fetcher)
        pool = await stack.enter_async_context(ExtractPool(settings, workers))
        archive = stack.enter_context(Archive(archive_path, journal.archive_end)) if archive_path else None
        meter = stack.enter_context(Meter("scrape", "pages", total=planned.urls, done=journal.finished))
        run = Crawl(fetcher, pool, journal, archive, meter)
        for position, reason in planned.refused:
            if position not in journal:
                run.settle(position, None, reason=reason)
        await run.pages(planned.queues.values())
