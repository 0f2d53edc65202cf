"""Fetching one page politely: robots.txt obeyed, one request at a time a host, checked redirects, limits, retries.

A page ends as a `Page` or as a `PageError` with a named reason; nothing a server does raises anything else.
"""

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from types import TracebackType

import aiohttp
from yarl import URL

from common.console import warn
from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.scrape.content_coding import decode_body
from corpus.scrape.network import NO_ANSWER, Addresses, open_session
from corpus.scrape.robots import RobotsRules, fetch_robots
from corpus.urls.hosts import is_private_host
from corpus.urls.public_suffix import registered_domain
from corpus.urls.rules import UrlRules
from corpus.urls.url import Url, parse_url

PAGE_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
BINARY = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # files that servers pass off as HTML
_CLOSED = frozenset({"private_host", "no_contact"})  # reasons of `_check`: as a redirect's target, it is refused
_LONGEST_WAIT = 300.0  # seconds; a host that asks for more (Crawl-delay, Retry-After) is not waited for
_HOSTS_KEPT = 8192  # hosts whose manners are remembered, 20 KB each with a usual robots.txt; twice those under way


@dataclass(frozen=True)
class Page:
    """A response worth reading. Its URL is the logical one, whatever address it came from."""

    url: str
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    content_type: str
    raw: bytes
    """The body as sent, without chunked framing."""
    body: bytes
    """The body without its Content-Encoding."""
    requested: str = ""
    """The URL that was asked for, before redirects, as it was given."""
    hops: tuple[str, ...] = ()
    """URLs of the redirects between the two."""


@dataclass
class _Host:
    """Manners towards one host."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request: one at a time."""
    free_at: float = 0.0
    """When the next request may start, on the loop's clock."""
    crawl_delay: float = 0.0
    robots_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    robots: dict[str, RobotsRules | str] = field(default_factory=dict)
    """Rules by origin (scheme, host, port), or the reason why nothing of that origin may be fetched."""
    answers: int = 0
    """Responses so far."""

    def is_idle(self, now: float) -> bool:
        """Whether nobody would miss it."""
        return not self.lock.locked() and not self.robots_lock.locked() and self.free_at <= now


class Fetcher:
    """Fetches pages through one session.

    `slots` bounds the pages in hand: each request takes one, and a returned Page keeps its own until the caller,
    done with the body, calls `slots.release()`. Slow extraction so slows the fetching instead of filling memory.
    """

    def __init__(self, settings: ScrapeSettings, rules: UrlRules, allow_private: bool = False) -> None:
        self.settings, self.rules = settings, rules
        self.addresses = Addresses(settings.resolve)
        self.slots = asyncio.Semaphore(settings.concurrency)
        self.answers = 0
        """Responses so far, from all hosts: a sign that the network works."""
        self._allow_private = allow_private
        self._hosts: dict[str, _Host] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Fetcher":
        self._session = await self._stack.enter_async_context(open_session(self.settings, self._allow_private))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def fetch(self, url: str) -> Page:
        """The page behind a URL, redirects followed, every hop checked. Raises PageError with the reason."""
        try:
            return replace(await self._follow(url), requested=url)
        except PageError:
            raise
        except Exception as error:  # a URL that a library chokes on
            raise _named(error, url) from None

    async def ask_robots(self, urls: Sequence[str]) -> None:
        """Raise PageError as `fetch` would for a URL and its redirects, without a request for the page itself."""
        targets = [parse_url(url) for url in urls] if self.settings.obey_robots else []
        for target in targets:
            try:
                await self._check_robots(target)
            except PageError as error:
                error.elsewhere = registered_domain(target.host) != registered_domain(targets[0].host)
                raise

    async def host_answers(self, url: str) -> bool:
        """Whether the host of a URL answers at all when it is asked for its robots.txt."""
        before = self.answers
        with suppress(PageError):
            if isinstance(await self._persistent(parse_url(parse_url(url).site.text + "/robots.txt"), None), Page):
                self.slots.release()
        return self.answers > before

    async def _follow(self, url: str) -> Page:
        target, reason = self.rules.check(url)
        if target is None or reason:
            raise PageError(reason or "malformed")
        site = registered_domain(target.host)
        seen: dict[str, None] = {}  # in their order
        for _ in range(self.settings.max_redirects + 1):
            try:
                answer = await self._obedient(target)
            except PageError as error:
                if seen and error.reason in _CLOSED:
                    raise PageError("redirect_refused") from None
                error.elsewhere = registered_domain(target.host) != site
                error.silent = error.silent and not seen
                raise
            if isinstance(answer, Page):
                return replace(answer, hops=tuple(seen)[1:])
            seen[target.text] = None
            target, reason = self.rules.check(answer)
            if target is None or reason:
                refusal = PageError("redirect_refused")
                refusal.refused = answer
                raise refusal
            if target.text in seen:
                raise PageError("redirect_loop")
        raise PageError("too_many_redirects")

    async def _obedient(self, url: Url) -> Page | str:
        """The answer to a URL that robots.txt allows."""
        if self.settings.obey_robots:
            await self._check_robots(url)
        return await self._persistent(url, PAGE_TYPES)

    async def _check_robots(self, url: Url) -> None:
        """Raise PageError where robots.txt forbids a URL, or cannot be asked."""
        host = self._host(url)
        sent = URL(url.text)
        origin = sent.origin()
        async with host.robots_lock:
            robots = host.robots.get(str(origin))
            if robots is None:
                robots = host.robots[str(origin)] = await self._robots(origin, host)
        if isinstance(robots, str):
            error = PageError(robots)
            error.silent = robots in NO_ANSWER or (robots == "robots_unreachable" and not host.answers)
            raise error
        if not robots.allows(sent.raw_path_qs):  # the path as it goes over the wire
            raise PageError("robots")

    async def _robots(self, origin: URL, host: _Host) -> RobotsRules | str:
        """The rules of an origin, or the reason why nothing of it may be fetched; its Crawl-delay is the host's."""

        async def ask(url: Url) -> bytes | str:
            answer = await self._persistent(url, None)
            if isinstance(answer, str):
                return answer
            self.slots.release()
            return answer.body

        robots = await fetch_robots(origin, self.settings.robot_token, ask)
        if not isinstance(robots, str):
            host.crawl_delay = max(host.crawl_delay, robots.crawl_delay)
        return "crawl_delay" if host.crawl_delay > _LONGEST_WAIT else robots

    # ---------------------------------------------------------------------------------------------- requests

    def _host(self, url: Url) -> _Host:
        """The manners towards the host of a URL; those not needed for longest make room when there are too many."""
        host = self._hosts[url.host] = self._hosts.pop(url.host, _Host())
        while len(self._hosts) > _HOSTS_KEPT:
            oldest = next(iter(self._hosts))
            if not self._hosts[oldest].is_idle(asyncio.get_running_loop().time()):
                break
            del self._hosts[oldest]
        return host

    def _check(self, host: str) -> None:
        """Raise PageError for a host that may not be contacted; names are checked again when they are resolved."""
        if self.addresses.given(host) is not None:
            return
        if not self.settings.contact:
            raise PageError("no_contact")
        if is_private_host(host) and not self._allow_private:
            raise PageError("private_host")

    async def _persistent(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """`_request`, tried again after failures that may pass; robots.txt (no `types`) also after a time-out."""
        for attempt in count():
            try:
                return await self._request(url, types)
            except PageError as error:
                patient = error.transient or (types is None and error.reason == "timeout")
                last = not patient or attempt == self.settings.retries or error.wait > _LONGEST_WAIT
                backoff = 0.0 if last else self.settings.retry_delay * 2**attempt * random.uniform(1.0, 1.25)
                # the whole host rests, not only this page
                rest = min(max(backoff, error.wait), _LONGEST_WAIT)
                host = self._host(url)
                host.free_at = max(host.free_at, asyncio.get_running_loop().time() + rest)
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _request(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """One request in the host's turn: a Page (its slot is kept) or the URL of a redirect."""
        self._check(url.host)
        host, loop = self._host(url), asyncio.get_running_loop()
        async with host.lock:
            await asyncio.sleep(host.free_at - loop.time())
            await self.slots.acquire()
            answer: Page | str | None = None
            heard = host.answers
            host.free_at = loop.time() + max(self.settings.host_delay, host.crawl_delay)
            try:
                async with asyncio.timeout(self.settings.page_timeout):
                    answer = await self._exchange(url, types)
            except Exception as error:
                named = error if isinstance(error, PageError) else _named(error, url.text)
                named.silent = named.reason in NO_ANSWER and host.answers == heard
                raise named from None
            finally:
                if not isinstance(answer, Page):
                    self.slots.release()
        return answer

    async def _exchange(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """Send one request and read its answer, no further than the limits allow."""
        target, headers = self.addresses.target(url)
        async with self._session.get(target, headers=headers, allow_redirects=False) as response:
            self.answers += 1
            self._host(url).answers += 1
            if response.status in _REDIRECTS and "Location" in response.headers:
                return _redirect(url, response.headers["Location"])
            if response.status not in (200, 203):
                transient = response.status == 429 or response.status >= 500
                raise PageError(f"http_{response.status}", transient=transient, wait=_retry_after(response))
            if types is not None and response.content_type not in types:
                raise PageError("content_type")
            limit = self.settings.max_bytes
            if (response.content_length or 0) > limit:
                raise PageError("too_large")
            received = bytearray()
            async for piece in response.content.iter_any():
                received += piece
                if len(received) > limit:
                    raise PageError("too_large")
            raw = bytes(received)  # the one copy: for a large page, another costs as much as its request
            body = decode_body(raw, response.headers.get("Content-Encoding", ""), limit)
            if types is not None and body.startswith(BINARY):
                raise PageError("content_type")
            return Page(
                url=url.text,
                status=response.status,
                reason=_ascii((response.reason or "").encode("utf-8", "surrogateescape")),
                headers=tuple((_ascii(name), _ascii(value)) for name, value in response.raw_headers),
                content_type=response.headers.get("Content-Type", ""),
                raw=raw,
                body=body,
            )


def _ascii(header: bytes) -> str:
    """A part of a header as an archive can hold it: `caf\\xe9` for other bytes than ASCII's."""
    return header.decode("ascii", "backslashreplace")


def _redirect(url: Url, location: str) -> str:
    """The absolute URL of a redirect."""
    try:
        return str(URL(url.text).join(URL(location)))
    except ValueError:
        raise PageError("redirect_refused") from None


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds a server asks to wait, from either form of Retry-After; 0 where it does not."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # no date, or one without a time zone
        return 0.0


def _named(error: Exception, url: str) -> PageError:
    """The failure of a request as a reason."""
    match error:
        case aiohttp.ConnectionTimeoutError():  # before TimeoutError, whose kind it is
            return PageError("connection", transient=True)
        case TimeoutError():
            return PageError("timeout")
        case aiohttp.ClientConnectorDNSError():
            code = getattr(error.os_error, "errno", None)
            return PageError("dns", transient=code == socket.EAI_AGAIN)
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            return PageError("tls")
        case aiohttp.ClientResponseError():
            return PageError("bad_response")
        case aiohttp.InvalidURL() | ValueError():
            return PageError("bad_url")
        case aiohttp.ClientError() | OSError():  # refused, reset, closed early
            return PageError("connection", transient=True)
    # A page that finds a hole in this list must not stop a run of millions; the log says what it was.
    warn(f"{url}: {type(error).__name__}: {error}")
    return PageError("unexpected")
