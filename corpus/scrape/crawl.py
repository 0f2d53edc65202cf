"""Crawl hosts in parallel, the pages of a host one by one; extract pages and journal outcomes."""

import asyncio
import resource
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.errors import ConfigError, PageError
from common.progress import Meter
from common.workers import Workers
from corpus.scrape.fetch import Fetcher
from corpus.scrape.journal import key_of
from corpus.scrape.network import AddressOverrides, exit_on_signals
from corpus.scrape.opt_outs import ROBOTS_REASONS, TDM_REASONS
from corpus.scrape.outage import require_network
from corpus.scrape.outcome_cache import PAGES, OutcomeCache
from corpus.scrape.pages import page_outcome
from corpus.scrape.response import FetchedPage
from corpus.urls.rules import UrlRules

_SYNC_INTERVAL = 1.0  # seconds between two fsyncs of journal and archive
_ACTIVE_HOSTS = 4096  # most of them wait for their delay; a task takes 3 KB


@dataclass(frozen=True)
class CrawlQueues:
    """A URL list, sorted for a crawl."""

    keys: list[str]
    """The form in which each URL is requested; "" for refused URLs."""
    refused: dict[int, str]
    """By position, why the rules drop a URL, or that it is a duplicate."""
    queues: dict[str, list[tuple[int, str]]]
    """(position, URL) of the others by host, the longest queue first."""

    def positions(self) -> Iterator[int]:
        """Positions of all URLs that are not refused."""
        return (position for queue in self.queues.values() for position, _ in queue)


def sort_into_queues(urls: Sequence[str], rules: UrlRules) -> CrawlQueues:
    """Apply the URL rules, drop duplicates, and group the URLs by host."""
    keys: list[str] = []
    refused: dict[int, str] = {}
    queues: dict[str, list[tuple[int, str]]] = defaultdict(list)
    seen: set[str] = set()
    for position, url in enumerate(urls):
        parsed, reason = rules.check(url)
        if parsed is None or reason:
            refused[position] = reason or "malformed"
        elif parsed.canonical in seen:
            refused[position] = "duplicate"
        else:
            seen.add(parsed.canonical)
            queues[parsed.host].append((position, url))
        keys.append("" if position in refused or parsed is None else parsed.text)
    # longest first: a host's delays add up, so the longest queue determines the run time
    return CrawlQueues(keys, refused, dict(sorted(queues.items(), key=lambda item: len(item[1]), reverse=True)))


def require_contact(queues: CrawlQueues, cache: OutcomeCache) -> None:
    """Raise ConfigError if a public host would be contacted without scrape.contact."""
    addresses = AddressOverrides(cache.settings.resolve)
    for host, queue in queues.queues.items():
        if cache.settings.contact or addresses.get(host) is not None:
            continue
        asks = cache.settings.opt_outs == "obey"  # for tdmrep.json, which no archive has
        if any((asks or not cache.in_archive(position)) and not cache.is_done(position) for position, _ in queue):
            raise ConfigError(f"scrape.contact is empty: set a mail address or page for site owners to scrape {host}")


async def crawl(queues: CrawlQueues, cache: OutcomeCache, rules: UrlRules, workers: int) -> "Crawl":
    """Fetch every URL without a valid outcome. SIGTERM and SIGHUP raise SystemExit after a sync."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # idle connections exceed the usual 1,024
    done = len(queues.refused) + sum(map(cache.is_done, queues.positions()))
    with exit_on_signals(), Workers(workers) as pool:
        pool.start()  # now: it forks, and later there are threads
        with Meter("scrape", "pages", total=len(queues.keys), done=done) as meter:
            async with Fetcher(cache.settings, rules) as fetcher:
                run = Crawl(fetcher, pool, cache, meter)
                await run.crawl(list(queues.queues.values()))
                return run


class Crawl:
    """One crawl: hosts in parallel, the pages of a host one by one, each outcome to the journal."""

    def __init__(self, fetcher: Fetcher, pool: Workers, cache: OutcomeCache, meter: Meter) -> None:
        self.fetcher, self.pool, self.cache, self.archive, self.meter = fetcher, pool, cache, cache.archive, meter
        self._page_outcome = partial(page_outcome, cache.settings)
        self.reasons: Counter[str] = Counter()
        self.parked: set[int] = set()
        """Positions of known URLs that this list gives up after too many failures of their host."""
        self.fetched = self.extracted_again = 0
        self._unconfirmed: deque[tuple[int, str, dict[str, Any]]] = deque()
        """Failures until a host responds: the number of responses before, URL, outcome."""

    async def crawl(self, queues: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Crawl (position, URL) queues, one per host. Raises OutageError."""
        active = asyncio.Semaphore(_ACTIVE_HOSTS)
        try:
            async with asyncio.TaskGroup() as background:
                syncing = background.create_task(self._sync_periodically())
                async with asyncio.TaskGroup() as tasks:
                    for queue in queues:
                        await active.acquire()
                        host = tasks.create_task(self._crawl_host(queue, tasks))
                        host.add_done_callback(lambda _: active.release())
                self._record_confirmed()
                if self._unconfirmed:
                    failures = {url: outcome["reason"] for _, url, outcome in self._unconfirmed}
                    await require_network(self.fetcher, failures, queues, self.cache.reason)
                    self._record_confirmed()
                syncing.cancel()
        finally:
            self._sync()

    async def _crawl_host(self, queue: Sequence[tuple[int, str]], tasks: asyncio.TaskGroup) -> None:
        """Fetch the pages of one host in order; each is extracted while the next one is fetched.

        After too many failures in a row the host is parked. Known failures count, too, in the
        list's order, so a resumed run parks a host as a run from scratch would. A known page is
        never given up.
        """
        failures, no_response = 0, False
        for position, url in queue:
            known = self.cache.reason(position)
            if failures >= self.cache.settings.host_failures and known not in PAGES:
                if not known:
                    error = PageError("host_parked")
                    error.no_response = no_response
                    self._fail(url, error)
                    await asyncio.sleep(0)  # there may be thousands: let other hosts run
                elif known != "host_parked":
                    self.parked.add(position)
                continue
            try:
                page = None if self.cache.is_valid(position) else await self._get_page(position, url)
            except PageError as error:
                failures, no_response = failures + 1 if error.host_failed else 0, error.no_response
                self._fail(url, error)
                await asyncio.sleep(0)  # there may be thousands without a request
                continue
            host_failed = page is None and self.cache.known(position).get("host_failed")
            failures, no_response = failures + 1 if host_failed else 0, False
            if page is not None:
                tasks.create_task(self._extract(url, page))

    # ------------------------------------------------------------ pages

    async def _get_page(self, position: int, url: str) -> FetchedPage:
        """The page of a URL, from the archive if possible."""
        if self.archive is not None and self.cache.in_archive(position):
            response = self.archive.read(key_of(url), self.fetcher.settings.max_bytes)
            if isinstance(response, str):
                raise PageError(response)
            page = replace(response, requested=url, hops=tuple(self.cache.known(position).get("hops", ())))
            if self.fetcher.settings.opt_outs == "obey":
                page = await self.fetcher.judge(page)
            await self.fetcher.slots.acquire()
            self.extracted_again += 1
            return page
        self.fetched += 1
        return await self.fetcher.fetch(url)

    async def _extract(self, url: str, page: FetchedPage) -> None:
        """Extract the text of a page, record the outcome and release the page's slot."""
        try:
            outcome = await asyncio.wrap_future(self.pool.submit(self._page_outcome, page))
            # a page that is not to be mined is not kept in the archive either
            opted_out = outcome.get("reason") in ROBOTS_REASONS | TDM_REASONS
            self._record(url, None if opted_out else page, **outcome)
        finally:
            self.fetcher.slots.release()

    # ------------------------------------------------------------ outcomes

    def _record(self, url: str, page: FetchedPage | None, **outcome: Any) -> None:
        """Archive a page and journal its outcome without await: both files have it or none."""
        size = 0
        if page is not None:
            size = len(page.raw)
            outcome["size"] = max(size, len(page.body))
            if page.hops:
                outcome["hops"] = page.hops
            if self.archive is not None and not page.archived:
                self.archive.append(page)
        self.cache.journal.append(url, **outcome)
        self.reasons[outcome.get("reason", "ok")] += 1
        self.meter.advance(size=size)

    def _fail(self, url: str, error: PageError) -> None:
        """Record a failure; defer it if the network may be down."""
        outcome: dict[str, Any] = {"reason": error.reason}
        if error.host_failed:
            outcome["host_failed"] = True
        if error.refused_url:
            outcome["refused"] = error.refused_url
        if error.no_response:
            self._unconfirmed.append((self.fetcher.response_count, url, outcome))
        else:
            self._record(url, None, **outcome)
        self._record_confirmed()

    def _record_confirmed(self) -> None:
        """Record the failures that happened before the last response: the network was up."""
        while self._unconfirmed and self._unconfirmed[0][0] < self.fetcher.response_count:
            _, url, outcome = self._unconfirmed.popleft()
            self._record(url, None, **outcome)

    async def _sync_periodically(self) -> None:
        """Every second, sync the files and refresh the counts on display."""
        while True:
            await asyncio.sleep(_SYNC_INTERVAL)
            self._record_confirmed()
            await asyncio.to_thread(self._sync)
            counts = [f"{count} {reason}" for reason, count in self.reasons.most_common(6)]
            self.meter.advance(0, note=", ".join(counts))

    def _sync(self) -> None:
        if self.archive is not None:  # first, as the journal refers to it
            self.archive.sync()
        self.cache.journal.sync()
