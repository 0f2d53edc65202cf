"""Fetch pages politely: robots.txt, opt-outs, one request per host, redirects, limits, retries.

A fetch returns a `FetchedPage` or raises a `PageError` with a reason, whatever the server sends.
"""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from yarl import URL

from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.scrape.network import NO_RESPONSE, AddressOverrides, open_session
from corpus.scrape.opt_outs import TDMREP_PATH, check_headers, parse_tdmrep
from corpus.scrape.response import PAGE_TYPES, FetchedPage, read_response, to_page_error
from corpus.scrape.robots import PathRules, fetch_file, fetch_robots
from corpus.urls.hosts import is_private_host, registered_domain
from corpus.urls.rules import UrlRules
from corpus.urls.url import Url, parse_url

_MAX_WAIT = 300.0  # seconds; a host that asks for more (Crawl-delay, Retry-After) is given up


@dataclass
class _HostState:
    """The limits of requests to one host."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request: one at a time."""
    free_at: float = 0.0
    """When the next request may start, on the loop's clock."""
    crawl_delay: float = 0.0
    robots_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    robots: dict[str, PathRules | str] = field(default_factory=dict)
    """By origin (scheme, host, port): its rules, or why nothing of it may be fetched."""
    tdmrep_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tdmrep: dict[str, PathRules | str] = field(default_factory=dict)
    """By origin: the rules of its tdmrep.json, or why they are unknown."""
    response_count: int = 0


class Fetcher:
    """Fetches pages through one session.

    `slots` bounds the pages in memory: each request takes one, and the caller of `fetch` calls
    `slots.release()` after the page. This applies back-pressure when extraction is slow.
    """

    def __init__(self, settings: ScrapeSettings, rules: UrlRules) -> None:
        self.settings, self.rules = settings, rules
        self.addresses = AddressOverrides(settings.resolve)
        self.slots = asyncio.Semaphore(settings.concurrency)
        self.response_count = 0
        """Responses so far, from all hosts."""
        self._hosts: defaultdict[str, _HostState] = defaultdict(_HostState)  # 20 KB each with a typical robots.txt

    async def __aenter__(self) -> "Fetcher":
        self._session = open_session(self.settings, self.rules.allow_private)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def fetch(self, url: str) -> FetchedPage:
        """Fetch the page of a URL, checking every redirect. Raises PageError."""
        try:
            page = replace(await self._follow_redirects(url), requested=url)
            if self.settings.opt_outs == "obey":
                self.slots.release()  # another request may follow; waiting for a slot with one is a deadlock
                page = await self.judge(page)
                await self.slots.acquire()
            return page
        except PageError:
            raise
        except Exception as error:  # a URL that a library cannot handle
            raise to_page_error(error, url) from None

    async def probe(self, url: str) -> bool:
        """Request the robots.txt of a URL's host; returns whether the host responds at all."""
        before = self.response_count
        with suppress(PageError):
            await self._request_file(parse_url(parse_url(url).site + "/robots.txt"))
        return self.response_count > before

    async def _follow_redirects(self, url: str) -> FetchedPage:
        target, reason = self.rules.check(url)
        if target is None or reason:
            raise PageError(reason or "malformed")
        site = registered_domain(target.host)
        visited: dict[str, None] = {}  # in order
        for _ in range(self.settings.max_redirects + 1):
            try:
                answer = await self._fetch_if_allowed(target)
            except PageError as error:
                if visited and error.reason in ("private_host", "no_contact"):
                    raise PageError("redirect_refused") from None
                error.off_site = registered_domain(target.host) != site
                error.no_response = error.no_response and not visited
                raise
            if isinstance(answer, FetchedPage):
                return replace(answer, hops=tuple(visited)[1:])
            visited[target.text] = None
            target, reason = self.rules.check(answer)
            if target is None or reason:
                refusal = PageError("redirect_refused")
                refusal.refused_url = answer
                raise refusal
            if target.text in visited:
                raise PageError("redirect_loop")
        raise PageError("too_many_redirects")

    async def _fetch_if_allowed(self, url: Url) -> FetchedPage | str:
        """A page, or the URL of a redirect, if robots.txt allows the request."""
        if self.settings.obey_robots:
            await self._check_robots(url)
        return await self._with_retries(url, PAGE_TYPES)

    # ------------------------------------------------------------ robots.txt

    async def _check_robots(self, url: Url) -> None:
        """Raise PageError if robots.txt forbids a URL or cannot be fetched."""
        host, sent = self._hosts[url.host], URL(url.text)
        origin = str(sent.origin())
        async with host.robots_lock:
            if origin not in host.robots:
                robots = await fetch_robots(origin, self.settings.robot_token, self._request_file)
                host.robots[origin] = robots
                host.crawl_delay = max(host.crawl_delay, 0.0 if isinstance(robots, str) else robots.crawl_delay)
        robots = "crawl_delay" if host.crawl_delay > _MAX_WAIT else host.robots[origin]
        if isinstance(robots, str):
            error = PageError(robots)
            error.no_response = robots in NO_RESPONSE or (robots == "robots_unreachable" and not host.response_count)
            raise error
        if not robots.allows(sent.raw_path_qs):  # the path as sent
            raise PageError("robots")

    async def _request_file(self, url: Url) -> bytes | str:
        """The body of a file of any type, or the URL of a redirect."""
        answer = await self._with_retries(url, None)
        if isinstance(answer, str):
            return answer
        self.slots.release()
        return answer.body

    # ------------------------------------------------------------ opt-outs

    async def judge(self, page: FetchedPage) -> FetchedPage:
        """Set `reserved_by` from headers or tdmrep.json. The caller must not hold the page's slot.

        tdmrep.json is fetched after the first page of an origin: one that only redirects is not
        asked. Raises PageError: `x_robots_tag`, `tdmrep_unreachable`.
        """
        page = check_headers(page, self.settings)
        if page.reserved_by is not None:
            return page
        sent, target = URL(page.url), parse_url(page.url)
        host, origin = self._hosts[target.host], str(sent.origin())
        async with host.tdmrep_lock:
            if origin not in host.tdmrep:
                host.tdmrep[origin] = await self._fetch_tdmrep(origin)
        rules = host.tdmrep[origin]
        if isinstance(rules, str):
            error = PageError("tdmrep_unreachable")
            error.no_response = rules in NO_RESPONSE or not host.response_count
            error.off_site = registered_domain(target.host) != registered_domain(parse_url(page.requested).host)
            raise error
        return replace(page, reserved_by="tdmrep") if not rules.allows(sent.raw_path_qs) else page

    async def _fetch_tdmrep(self, origin: str) -> PathRules | str:
        """The rules of an origin, or why they are unknown; no rules if missing or forbidden."""
        url = parse_url(origin + TDMREP_PATH)
        try:
            if self.settings.obey_robots:
                await self._check_robots(url)
            file = await fetch_file(url.text, self._request_file)
        except PageError as error:  # of robots.txt
            file = b"" if error.reason == "robots" else error.reason
        return file if isinstance(file, str) else await asyncio.to_thread(parse_tdmrep, file)

    # ------------------------------------------------------------ requests

    def _require_contactable(self, host: str) -> None:
        """Raise PageError if a host must not be contacted; PublicResolver checks its address."""
        if self.addresses.get(host) is not None:
            return
        if not self.settings.contact:
            raise PageError("no_contact")
        if is_private_host(host) and not self.rules.allow_private:
            raise PageError("private_host")

    async def _with_retries(self, url: Url, types: frozenset[str] | None) -> FetchedPage | str:
        """`_request` with retries after transient failures, of a file also after a time-out."""
        for attempt in count():
            try:
                return await self._request(url, types)
            except PageError as error:
                retry = error.transient or (types is None and error.reason == "timeout")
                last = not retry or attempt == self.settings.retries or error.wait > _MAX_WAIT
                backoff = 0.0 if last else self.settings.retry_delay * 2**attempt * random.uniform(1.0, 1.25)
                # the whole host waits, not only this page
                wait = min(max(backoff, error.wait), _MAX_WAIT)
                host = self._hosts[url.host]
                host.free_at = max(host.free_at, asyncio.get_running_loop().time() + wait)
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _request(self, url: Url, types: frozenset[str] | None) -> FetchedPage | str:
        """One request once the host is free: a page, which keeps its slot, or a redirect's URL."""
        self._require_contactable(url.host)
        host, loop = self._hosts[url.host], asyncio.get_running_loop()
        async with host.lock:
            await asyncio.sleep(host.free_at - loop.time())
            await self.slots.acquire()
            answer: FetchedPage | str = ""
            before = host.response_count
            host.free_at = loop.time() + max(self.settings.host_delay, host.crawl_delay)
            try:
                async with asyncio.timeout(self.settings.page_timeout):
                    answer = await self._exchange(url, types)
            except Exception as error:
                page_error = error if isinstance(error, PageError) else to_page_error(error, url.text)
                page_error.no_response = page_error.reason in NO_RESPONSE and host.response_count == before
                raise page_error from None
            finally:
                if not isinstance(answer, FetchedPage):
                    self.slots.release()
        return answer

    async def _exchange(self, url: Url, types: frozenset[str] | None) -> FetchedPage | str:
        """Send one request and read its response."""
        target, headers = self.addresses.target(url)
        async with self._session.get(target, headers=headers, allow_redirects=False) as response:
            self.response_count += 1
            self._hosts[url.host].response_count += 1
            return await read_response(response, url, types, self.settings.max_bytes)
