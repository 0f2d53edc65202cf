"""The HTTP session, and the address that each URL is fetched from.

Hosts in `scrape.resolve` are reached at the address given there, over plain HTTP, with the logical
name in the Host header. Other names go through DNS, and private addresses are never connected to.
`exit_on_signals` ends a loop of requests.
"""

import asyncio
import ipaddress
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from common.errors import ConfigError, PageError
from common.settings import ScrapeSettings
from corpus.urls.hosts import is_private_address
from corpus.urls.url import Url

_KEEP_ALIVE = 5.0  # seconds an idle connection is kept, Apache's default; there may be one per host
_HEADER_BYTES = 64 * 1024  # longest header line; the cookies and policies of some sites exceed aiohttp's 8 KiB
_HEADER_LINES = 1000  # some sites exceed aiohttp's 128
_BLANK_LINE = re.compile(rb"\n\r?\n")
NO_RESPONSE = frozenset({"connection", "dns", "tls", "timeout", "private_host"})
"""Reasons without a response; captive portals resolve names to private addresses."""


class PublicResolver(AbstractResolver):
    """DNS without private addresses.

    aiohttp connects to exactly the addresses returned here, which rules out DNS rebinding.
    """

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The public addresses of a name. Raises PageError if all are private, OSError if none.

        A look-up may hang, so each has its own daemon thread: it fills no pool and is not joined at
        exit. The slots of the Fetcher bound the number of threads.
        """
        addresses: Future[list[tuple[Any, ...]]] = Future()
        addresses.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                answer = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
                addresses.set_result(answer)
            except Exception as error:
                addresses.set_exception(error)

        threading.Thread(target=look_up, daemon=True).start()
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        allowed = [
            ResolveResult(hostname=host, host=address[0], port=address[1], family=kind, proto=protocol, flags=numeric)
            for kind, _, protocol, _, address in await asyncio.wrap_future(addresses)
            if self._allow_private or not is_private_address(address[0])
        ]
        if not allowed:
            raise PageError("private_host")
        return allowed

    async def close(self) -> None:
        """Nothing to close."""


class AddressOverrides:
    """`scrape.resolve`: hosts reached at an ip:port. Raises ConfigError for a malformed address."""

    def __init__(self, table: Mapping[str, str]) -> None:
        for host, address in table.items():
            ip, _, port = address.rpartition(":")
            try:
                ipaddress.ip_address(ip.removeprefix("[").removesuffix("]"))
                if not 0 < int(port) < 65536:
                    raise ValueError
            except ValueError:
                raise ConfigError(f"scrape.resolve: {host}={address} must name an ip:port") from None
        self._table = {host.lower(): address for host, address in table.items()}

    def get(self, host: str) -> str | None:
        """The ip:port of a host, or None to use DNS."""
        return self._table.get(host) or self._table.get("*")

    def target(self, url: Url) -> tuple[URL, dict[str, str]]:
        """The URL to send the request for `url` to, and the headers that go with it."""
        logical = URL(url.text)
        address = self.get(url.host)
        if address is None:
            return logical, {}
        host = logical.host_port_subcomponent or url.host
        return URL(f"http://{address}{logical.raw_path_qs}", encoded=True), {"Host": host}


class _Handler(ResponseHandler):
    """Passes the bytes of a response to aiohttp's parser in pieces that end with a blank line.

    The parser loses a whole response if its head comes in one piece with bytes after its end. Other
    bytes after the end are ignored, as in browsers.
    """

    def data_received(self, data: bytes) -> None:
        start, first = 0, 2 if data.startswith(b"\r\n") else int(data.startswith(b"\n"))  # ends a line before `data`
        for end in (first, *(blank.end() for blank in _BLANK_LINE.finditer(data)), len(data)):
            if start < end:
                super().data_received(data[start:end])
            start = end


def open_session(settings: ScrapeSettings, allow_private: bool, *, trust_env: bool = False) -> aiohttp.ClientSession:
    """One session per run: persistent connections, cached DNS, verified TLS, no cookies.

    `trust_env`: with the proxies of the environment, and passwords from ~/.netrc.
    """
    contact = f" ({settings.contact})" if settings.contact else ""
    connector = aiohttp.TCPConnector(
        limit=settings.concurrency,
        keepalive_timeout=_KEEP_ALIVE,
        ttl_dns_cache=300,
        resolver=PublicResolver(allow_private),
    )
    handler: Any = partial(_Handler, asyncio.get_running_loop())
    connector._factory = handler
    return aiohttp.ClientSession(
        connector=connector,
        trust_env=trust_env,
        headers={
            "User-Agent": settings.user_agent + contact,
            "Accept": "text/html,application/xhtml+xml,text/plain;q=0.8",
            "Accept-Encoding": "gzip, deflate",
        },
        # the caller sets the total: it also bounds DNS and the wait for a free connection
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout, sock_read=settings.read_timeout
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # archives store the bytes as sent, and `decode_body` stops at the cap
        max_line_size=_HEADER_BYTES,
        max_field_size=_HEADER_BYTES,
        max_headers=_HEADER_LINES,
    )


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP (unless ignored, as by nohup) cancel the task and raise SystemExit."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # a second signal must not cancel the clean-up
            received.append(number)
            task.cancel()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
