"""Fetching one page politely: robots.txt, one request at a time a host, checked redirects, limits, retries.

A page ends as a `Page` or as a `PageError` with a named reason; nothing a server does raises anything else.
"""

import asyncio
import random
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from types import TracebackType

import aiohttp
from protego import Protego
from yarl import URL

from common.settings import ScrapeSettings
from corpus.network import Addresses, PageError, decode_body, open_session
from corpus.urls import Url, UrlRules, is_private_address, parse_url

PAGE_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BINARY = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # files that servers pass off as HTML
_ROBOTS_BYTES = 500 * 1024  # RFC 9309, section 2.5
_ROBOTS_REDIRECTS = 5  # RFC 9309, section 2.3.1.2
_CLOSED = frozenset({"private_host", "no_contact"})  # reasons of `_check`: as a redirect's target, it is refused
_LONGEST_WAIT = 300.0  # seconds; a host that asks for more (Crawl-delay, Retry-After) is not waited for


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


@dataclass
class _Host:
    """Manners towards one host."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request: one at a time."""
    free_at: float = 0.0
    """When the next request may start, on the loop's clock."""
    crawl_delay: float = 0.0
    robots_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    robots: dict[str, Protego | str] = field(default_factory=dict)
    """Rules by origin (scheme, host, port), or the reason why nothing of that origin may be fetched."""


class Fetcher:
    """Fetches pages through one session.

    `slots` bounds the pages in hand: each request takes one, and a returned Page keeps its own until the caller,
    done with the body, calls `slots.release()`. Slow extraction so slows the fetching instead of filling memory.
    """

    def __init__(self, settings: ScrapeSettings, rules: UrlRules, allow_private: bool = False) -> None:
        self.settings, self.rules = settings, rules
        self.addresses = Addresses(settings.resolve)
        self.slots = asyncio.Semaphore(settings.concurrency)
        self._allow_private = allow_private
        self._robot = settings.user_agent.split("/")[0]  # robots.txt names the product, not its version
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
        target, reason = self.rules.check(url)
        if target is None or reason:
            raise PageError(reason or "malformed")
        seen: set[str] = set()
        for _ in range(self.settings.max_redirects + 1):
            try:
                answer = await self._obedient(target)
            except PageError as error:
                raise PageError("redirect_refused" if seen and error.reason in _CLOSED else error.reason) from None
            if isinstance(answer, Page):
                return answer
            seen.add(target.text)
            target, reason = self.rules.check(answer)
            if target is None or reason:
                raise PageError("redirect_refused")
            if target.text in seen:
                raise PageError("redirect_loop")
        raise PageError("too_many_redirects")

    # -------------------------------------------------------------------------------------------- robots.txt

    async def _obedient(self, url: Url) -> Page | str:
        """The answer to a URL that robots.txt allows."""
        if self.settings.obey_robots:
            host = self._host(url)
            origin = URL(url.text).origin()
            async with host.robots_lock:
                robots = host.robots.get(str(origin))
                if robots is None:
                    robots = host.robots[str(origin)] = await self._robots(origin, host)
            if isinstance(robots, str):
                raise PageError(robots)
            if not robots.can_fetch(url.text, self._robot):
                raise PageError("robots")
        return await self._persistent(url, PAGE_TYPES)

    async def _robots(self, origin: URL, host: _Host) -> Protego | str:
        """The rules of an origin: everything is allowed where it has none (4xx), nothing where it cannot say."""
        rules = Protego.parse("")
        location = f"{origin}/robots.txt"
        for hop in range(_ROBOTS_REDIRECTS + 1):
            try:
                target = parse_url(location)
                answer = await self._persistent(target, None)
            except ValueError:
                break
            except PageError as error:
                if error.reason.startswith("http_5") or error.reason in ("http_429", "timeout"):
                    return "robots_unreachable"
                if error.reason.startswith("http_") or error.reason in ("too_large", "bad_encoding"):
                    break
                if hop and error.reason in _CLOSED:
                    break  # a redirect to nowhere
                return error.reason  # the host itself is out of reach, and so are its pages
            if isinstance(answer, Page):
                self.slots.release()
                rules = Protego.parse(answer.body[:_ROBOTS_BYTES].decode("utf-8", "replace"))
                break
            location = answer
        host.crawl_delay = max(host.crawl_delay, rules.crawl_delay(self._robot) or 0.0)
        return "crawl_delay" if host.crawl_delay > _LONGEST_WAIT else rules

    # ---------------------------------------------------------------------------------------------- requests

    def _host(self, url: Url) -> _Host:
        return self._hosts.setdefault(url.host, _Host())

    def _check(self, host: str) -> None:
        """Raise PageError for a host that may not be contacted; names are checked again when they are resolved."""
        if self.addresses.given(host) is not None:
            return
        if not self.settings.contact:
            raise PageError("no_contact")
        try:
            private = is_private_address(host)
        except ValueError:
            return  # a name
        if private and not self._allow_private:
            raise PageError("private_host")

    async def _persistent(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """`_request`, tried again after failures that may pass; robots.txt (no `types`) also after a time-out."""
        for attempt in count():
            try:
                return await self._request(url, types)
            except PageError as error:
                patient = error.transient or (types is None and error.reason == "timeout")
                if not patient or attempt == self.settings.retries or error.wait > _LONGEST_WAIT:
                    raise
                backoff = self.settings.retry_delay * 2**attempt * random.uniform(1.0, 1.25)
                # the whole host rests, not only this page
                host = self._host(url)
                host.free_at = max(host.free_at, asyncio.get_running_loop().time() + max(backoff, error.wait))
        raise AssertionError("unreachable")

    async def _request(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """One request in the host's turn: a Page (its slot is kept) or the URL of a redirect."""
        self._check(url.host)
        host, loop = self._host(url), asyncio.get_running_loop()
        async with host.lock:
            await asyncio.sleep(host.free_at - loop.time())
            await self.slots.acquire()
            answer: Page | str | None = None
            host.free_at = loop.time() + max(self.settings.host_delay, host.crawl_delay)
            try:
                async with asyncio.timeout(self.settings.page_timeout):
                    answer = await self._exchange(url, types)
            except PageError:
                raise
            except Exception as error:
                raise _named(error, url) from None
            finally:
                if not isinstance(answer, Page):
                    self.slots.release()
        return answer

    async def _exchange(self, url: Url, types: frozenset[str] | None) -> Page | str:
        """Send one request and read its answer, no further than the limits allow."""
        target, headers = self.addresses.target(url)
        async with self._session.get(target, headers=headers, allow_redirects=False) as response:
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
            raw = bytearray()
            async for piece in response.content.iter_any():
                raw += piece
                if len(raw) > limit:
                    raise PageError("too_large")
            body = decode_body(bytes(raw), response.headers.get("Content-Encoding", ""), limit)
            if types is not None and body.startswith(_BINARY):
                raise PageError("content_type")
            return Page(
                url=url.text,
                status=response.status,
                reason=response.reason or "",
                headers=tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in response.raw_headers),
                content_type=response.headers.get("Content-Type", ""),
                raw=bytes(raw),
                body=body,
            )


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
    except (ValueError, TypeError):  # no date, or one without a time zone
        return 0.0


def _named(error: Exception, url: Url) -> PageError:
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
    print(f"warning: {url.text}: {type(error).__name__}: {error}", file=sys.stderr)
    return PageError("unexpected")
