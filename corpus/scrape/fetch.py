"""Fetch pages politely: robots.txt, opt-outs, one request per host, redirects, limits, retries.

A fetch returns a `FetchedPage` or raises a `PageError` with a reason, whatever the server sends.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
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
    response_count: int = 0


@dataclass
class _OriginFile:
    """The robots.txt or tdmrep.json of an origin (scheme, host, port)."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is fetched."""
    rules: PathRules | str | None = None
    """Its rules, or why they are unknown; None until it was fetched."""


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
        self._hosts: defaultdict[str, _HostState] = defaultdict(_HostState)
        self._files: defaultdict[str, _OriginFile] = defaultdict(_OriginFile)  # 20 KB each, typically

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
                self.slots.release()  # a request may follow; holding a slot while waiting for one is a deadlock
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
                if self.settings.obey_robots:
                    await self._check_robots(target)
                answer = await self._with_retries(target, PAGE_TYPES)
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

    # ------------------------------------------------------------ robots.txt

    async def _rules(self, url: str, fetch: Callable[[], Awaitable[PathRules | str]]) -> PathRules | str:
        """The rules of an origin's file, fetched once, or why they are unknown."""
        file = self._files[url]
        async with file.lock:
            if file.rules is None:
                file.rules = await fetch()
        return file.rules

    async def _check_robots(self, url: Url) -> None:
        """Raise PageError if robots.txt forbids a URL or cannot be fetched."""
        host, sent = self._hosts[url.host], URL(url.text)
        location, name = f"{sent.origin()}/robots.txt", self.settings.robot_token
        robots = await self._rules(location, lambda: fetch_robots(location, name, self._request_file))
        if isinstance(robots, PathRules):
            host.crawl_delay = max(host.crawl_delay, robots.crawl_delay)
        if host.crawl_delay > _MAX_WAIT:
            raise PageError("crawl_delay")
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
        sent, host = URL(page.url), parse_url(page.url).host
        location = parse_url(f"{sent.origin()}{TDMREP_PATH}")
        rules = await self._rules(location.text, lambda: self._fetch_tdmrep(location))
        if isinstance(rules, str):
            error = PageError("tdmrep_unreachable")
            error.no_response = rules in NO_RESPONSE or not self._hosts[host].response_count
            error.off_site = registered_domain(host) != registered_domain(parse_url(page.requested).host)
            raise error
        return page if rules.allows(sent.raw_path_qs) else replace(page, reserved_by="tdmrep")

    async def _fetch_tdmrep(self, url: Url) -> PathRules | str:
        """The rules of a tdmrep.json, or why they are unknown; no rules if missing or forbidden."""
        try:
            if self.settings.obey_robots:
                await self._check_robots(url)
            file = await fetch_file(url.text, self._request_file)
        except PageError as error:  # of robots.txt
            file = b"" if error.reason == "robots" else error.reason
        return file if isinstance(file, str) else await asyncio.to_thread(parse_tdmrep, file)

    # ------------------------------------------------------------ requests

    async def _with_retries(self, url: Url, types: frozenset[str] | None) -> FetchedPage | str:
        """`_request`, again after transient failures; without `types` also after a time-out."""
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
        if self.addresses.get(url.host) is None:
            if not self.settings.contact:
                raise PageError("no_contact")
            if is_private_host(url.host) and not self.rules.allow_private:  # PublicResolver checks names
                raise PageError("private_host")
        host, loop = self._hosts[url.host], asyncio.get_running_loop()
        async with host.lock:
            await asyncio.sleep(host.free_at - loop.time())
            await self.slots.acquire()
            answer: FetchedPage | str = ""
            before = host.response_count
            host.free_at = loop.time() + max(self.settings.host_delay, host.crawl_delay)
            try:
                target, headers = self.addresses.target(url)
                async with (
                    asyncio.timeout(self.settings.page_timeout),
                    self._session.get(target, headers=headers, allow_redirects=False) as response,
                ):
                    self.response_count += 1
                    host.response_count += 1
                    answer = await read_response(response, url, types, self.settings.max_bytes)
            except Exception as error:
                page_error = error if isinstance(error, PageError) else to_page_error(error, url.text)
                page_error.no_response = page_error.reason in NO_RESPONSE and host.response_count == before
                raise page_error from None
            finally:
                if not isinstance(answer, FetchedPage):
                    self.slots.release()
        return answer
