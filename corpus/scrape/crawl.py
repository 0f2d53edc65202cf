"""The crawl itself: hosts side by side, the pages of a host in turn, extraction meanwhile, every outcome journalled."""

import asyncio
import resource
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.errors import InputError, OutageError, PageError
from common.progress import Meter
from common.settings import BlacklistSettings
from corpus.extract.pool import ExtractPool
from corpus.scrape.archive import Archive
from corpus.scrape.fetch import Fetcher, Page
from corpus.scrape.journal import ARCHIVED
from corpus.scrape.journal_lines import key_of
from corpus.scrape.known import Known
from corpus.scrape.network import NO_ANSWER
from corpus.scrape.pages import page_outcome
from corpus.scrape.queues import Plan
from corpus.urls.public_suffix import registered_domain
from corpus.urls.rules import UrlRules
from corpus.urls.url import parse_url

_SYNC_INTERVAL = 1.0  # seconds between two fsyncs of journal and archive
_HOSTS_UNDER_WAY = 4096  # most of them wait for their delay; a task takes 3 KB
_WITNESSES = 3  # sites that are asked whether the network is up
# failures that do not prove that the host ever answered
_UNHEARD = NO_ANSWER | {"", ARCHIVED, "robots_unreachable", "host_parked", "no_contact", "bad_url", "unexpected"}


@dataclass(frozen=True)
class _Failure:
    """A page that nobody answered for: settled when somebody answers after it, the network is up then."""

    answers: int
    """Responses before it."""
    position: int
    url: str
    outcome: dict[str, Any]


class Crawl:
    """One scrape under way: hosts side by side, the pages of a host in turn, each outcome into the journal."""

    def __init__(
        self,
        fetcher: Fetcher,
        pool: ExtractPool,
        known: Known,
        archive: Archive | None,
        meter: Meter,
        *,
        refetch: bool = False,
    ) -> None:
        self.fetcher, self.pool, self.known, self.archive, self.meter = fetcher, pool, known, archive, meter
        self.journal = known.journal
        self.reasons: Counter[str] = Counter()
        self.parked: set[int] = set()
        """URLs that are known, but given up in this list: too many before them failed by their host's fault."""
        self.fetched = self.extracted_again = 0
        self._refetch = refetch
        self._unanswered: deque[_Failure] = deque()

    async def pages(self, queues: Iterable[Sequence[tuple[int, str]]]) -> None:
        """Settle every (position, URL) whose outcome is not known, one queue per host. Raises OutageError."""
        active = asyncio.Semaphore(_HOSTS_UNDER_WAY)
        queues = list(queues)
        try:
            async with asyncio.TaskGroup() as watch:
                tending = watch.create_task(self._tend())
                async with asyncio.TaskGroup() as tasks:
                    for queue in queues:
                        await active.acquire()
                        host = tasks.create_task(self._host(queue, tasks))
                        host.add_done_callback(lambda _: active.release())
                await self._judge_silence(queues)
                tending.cancel()
        finally:
            self._sync()

    async def _host(self, queue: Sequence[tuple[int, str]], tasks: asyncio.TaskGroup) -> None:
        """The pages of one host, one after the other; a page is extracted while the next one is fetched.

        After too many failures in a row the host is parked. They are counted in the list's order and also over what
        was known before, so that a run that was killed, or has another list, parks a host as one from scratch.
        """
        failures, silent = 0, False
        for position, url in queue:
            if self.known.is_parked(position, failures):
                failures += 1
                known = self.journal.reason(position)
                if known and known != "host_parked":
                    self.parked.add(position)
                elif not known:
                    error = PageError("host_parked")
                    error.silent = silent
                    self._fail(position, url, error)
                    await asyncio.sleep(0)  # they come by the thousand: the others are due, too
                continue
            try:
                page = None if self.known.holds(position) else await self._page(position, url)
            except PageError as error:
                failures, silent = failures + 1 if error.host_failed else 0, error.silent
                self._fail(position, url, error)
                await asyncio.sleep(0)  # as do failures without a request
                continue
            if page is None:
                failures, silent = failures + 1 if self.journal.host_failed(position) else 0, False
            else:
                failures, silent = 0, False
                tasks.create_task(self._extract(position, url, page))

    async def _page(self, position: int, url: str) -> "_Response | None":
        """The response of a URL; None where its known outcome proves to hold, now that robots.txt was asked."""
        if self.known.must_ask_robots(position):
            await self.fetcher.ask_robots(self.known.requested(position))
            if self.known.has_outcome(position):
                outcome = self.journal.outcome(position)
                del outcome["url"]
                self.journal.append(
                    position, url, made={**self.journal.made_with(position), "obey_robots": True}, **outcome
                )
                return None
        at = self.known.record_at(position)
        page = await self._archived(position, url, at) if at is not None else None
        if page is not None:
            self.extracted_again += 1
            return _Response(page, is_archived=True)
        self.fetched += 1
        return _Response(await self.fetcher.fetch(url), is_archived=False)

    async def _archived(self, position: int, url: str, at: int) -> Page | None:
        """A page of the archive, with a slot as if it was fetched; None where it is damaged and may be fetched again.

        Raises PageError where it is none by today's limits, InputError where it may not be fetched again.
        """
        assert self.archive is not None
        outcome = self.journal.outcome(position)
        found = self.archive.read(at, self.fetcher.settings.max_bytes)
        if found is None or not _is_same(found[0], url):
            if self._refetch or self.journal.reason(position) == ARCHIVED:
                return None
            raise InputError(
                f"{self.archive.path}: the record at byte {at} ({url}) is damaged; put the file back as it was, or "
                "have such pages fetched again by --refetch"
            )
        if isinstance(found[1], str):
            raise PageError(found[1])
        await self.fetcher.slots.acquire()
        return replace(found[1], requested=url, hops=tuple(outcome.get("hops", ())))

    async def _extract(self, position: int, url: str, response: "_Response") -> None:
        """The text of a page, settled; its slot is free again."""
        page = response.page
        try:
            found = await self.pool.extract(page.body, page.content_type, page.url)
        except PageError as error:
            self.settle(position, url, response, reason=error.reason)
        else:
            self.settle(position, url, response, **page_outcome(page, found))
        finally:
            self.fetcher.slots.release()

    # ---------------------------------------------------------------------------------------------- outcomes

    def settle(self, position: int, url: str, response: "_Response | None", **outcome: Any) -> None:
        """Archive a response and journal what became of it, in one go: no page is in one but not in the other."""
        size = 0
        if response is not None:
            page = response.page
            size = len(page.raw)
            outcome["size"] = max(size, len(page.body))
            if page.hops:
                outcome["hops"] = page.hops
            if self.archive is not None and not response.is_archived:
                outcome["at"], outcome["archive"] = self.archive.append(page)
        self.journal.append(position, url, **outcome)
        self.reasons[outcome.get("reason", "ok")] += 1
        self.meter.advance(size=size)

    def _fail(self, position: int, url: str, error: PageError) -> None:
        """Settle a failure, or keep it back until it is known whether the network was up."""
        outcome: dict[str, Any] = {"reason": error.reason}
        if error.host_failed:
            outcome["host_failed"] = True
        if error.refused:
            outcome["refused"] = error.refused
        if error.silent:
            self._unanswered.append(_Failure(self.fetcher.answers, position, url, outcome))
        else:
            self.settle(position, url, None, **outcome)
        self._settle_failures(before=self.fetcher.answers)

    def _settle_failures(self, before: int) -> None:
        """Settle the failures kept back until there were so many answers."""
        while self._unanswered and self._unanswered[0].answers < before:
            failure = self._unanswered.popleft()
            self.settle(failure.position, failure.url, None, **failure.outcome)

    async def _judge_silence(self, queues: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Settle the failures after the last answer, or raise OutageError: nobody answered because the network is down.

        The rule: nobody's silence is believed unless somebody answers after it. Where the silent ones are the last,
        three sites that answered before, in this run or an earlier one, are asked for their robots.txt; an answer from
        one is enough. Where nobody ever answered there is nobody to ask, and it is an outage. Only a few URLs (fewer
        than scrape.host_failures) of one site that never answered are believed without asking, where others did: a dead
        site that was added to a list is nothing unusual.
        """
        self._settle_failures(before=self.fetcher.answers)
        if not self._unanswered:
            return
        silent = {_site(failure.url) for failure in self._unanswered}
        witnesses: dict[str, str] = {}
        for queue in queues:
            heard = next((url for position, url in queue if self.journal.reason(position) not in _UNHEARD), None)
            if heard is not None:
                witnesses.setdefault(_site(heard), heard)
        is_one_dead_site = (
            len(silent) == 1
            and silent.isdisjoint(witnesses)
            and len(self._unanswered) < self.fetcher.settings.host_failures
        )
        asked = sorted(witnesses, key=silent.__contains__)[:_WITNESSES]
        if not (witnesses and is_one_dead_site):
            for site in asked:
                if await self.fetcher.host_answers(witnesses[site]):
                    break
            else:
                reasons = Counter(failure.outcome["reason"] for failure in self._unanswered)
                also = f", nor {len(asked)} that answered before" if asked else ""
                raise OutageError(
                    f"no host answered: {len(self._unanswered)} URLs of {len(silent)} sites failed "
                    f"({', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}){also}; "
                    "this is not recorded, what was known is kept: see to the network and run it again, or take the "
                    "URLs of sites that are gone out of the list"
                )
        self._settle_failures(before=self.fetcher.answers + 1)

    async def _tend(self) -> None:
        """Every second: outcomes onto the disk, counts to whoever watches, also while nothing comes in."""
        while True:
            await asyncio.sleep(_SYNC_INTERVAL)
            self._settle_failures(before=self.fetcher.answers)
            await asyncio.to_thread(self._sync)
            counts = [f"{count} {reason}" for reason, count in self.reasons.most_common(6)]
            self.meter.advance(0, note=", ".join(counts))

    def _sync(self) -> None:
        if self.archive is not None:  # first, because the journal vouches for it
            self.archive.sync()
        self.journal.sync()


@dataclass(frozen=True)
class _Response:
    """A page to extract."""

    page: Page
    is_archived: bool
    """Whether it comes from the archive."""


def _site(url: str) -> str:
    """The registered domain of a URL."""
    return registered_domain(parse_url(url).host)


def _is_same(found: str, url: str) -> bool:
    """Whether two URLs are requested in the same form."""
    try:
        return key_of(found) == key_of(url)
    except ValueError:
        return False


class Stopped(Exception):
    """A signal ended the crawl; the argument is its number."""


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP cancel the current task, which ends in Stopped; an ignored SIGHUP (nohup) stays ignored."""
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert this is not None
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # a second one must not cancel the end
            received.append(number)
            this.cancel()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, handlers[number])


async def crawl(
    planned: Plan, known: Known, blacklist: BlacklistSettings, archive: Archive | None, workers: int, *, refetch: bool
) -> Crawl:
    """Settle every URL whose outcome is not known. SIGTERM and SIGHUP end it in Stopped, with every outcome on disk."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # idle connections outnumber the usual 1,024
    with _cancelled_by_signals():
        async with AsyncExitStack() as stack:
            fetcher = Fetcher(known.settings, UrlRules(blacklist), blacklist.allow_private_hosts)
            await stack.enter_async_context(fetcher)
            pool = await stack.enter_async_context(ExtractPool(known.settings, workers))
            done = len(planned.refused) + sum(map(known.is_settled, planned.positions()))
            meter = stack.enter_context(Meter("scrape", "pages", total=len(planned.keys), done=done))
            run = Crawl(fetcher, pool, known, archive, meter, refetch=refetch)
            await run.pages(planned.queues.values())
            return run
