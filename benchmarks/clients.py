"""HTTP clients that fetch the same pages, each used as its users would use it.

Each client fetches the pages of a host one after the other, over a single connection.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from benchmarks.loopback import pin

Hosts = Sequence[Sequence[str]]
"""URLs: one list per host."""
Client = Callable[[Hosts], None]

_THREADS = 32
_CONNECTIONS = 256  # scrape.concurrency's default


def _whole(status: int, body: bytes) -> None:
    if status != 200 or not body:
        raise RuntimeError(f"the server answered {status} with {len(body)} bytes")


def requests_sequential(hosts: Hosts) -> None:
    """One loop with one kept-alive session per host."""
    import requests

    for urls in hosts:
        with requests.Session() as session:
            for url in urls:
                answer = session.get(url, timeout=30)
                _whole(answer.status_code, answer.content)


def requests_threads(hosts: Hosts) -> None:
    """The same over 32 threads; each fetches all pages of a host, so that connections are reused."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda urls: requests_sequential([urls]), hosts))


HTTPX = next((name for name in ("httpx", "httpx2") if find_spec(name)), None)
"""The importable httpx package, if any."""


def httpx_tasks(hosts: Hosts) -> None:
    """httpx, one task per host."""
    assert HTTPX is not None
    httpx: Any = import_module(HTTPX)

    async def run() -> None:
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:

            async def one(urls: Sequence[str]) -> None:
                for url in urls:
                    answer = await client.get(url)
                    _whole(answer.status_code, answer.content)

            await asyncio.gather(*map(one, hosts))

    asyncio.run(run())


def aiohttp_tasks(hosts: Hosts) -> None:
    """aiohttp with its defaults, one task per host: no limits, no checks, no robots.txt."""
    import aiohttp

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)) as session:

            async def one(urls: Sequence[str]) -> None:
                for url in urls:
                    async with session.get(url) as answer:
                        _whole(answer.status, await answer.read())

            await asyncio.gather(*map(one, hosts))

    asyncio.run(run())


def _fetcher(hosts: Hosts, obey_robots: bool) -> None:
    from common.settings import BlacklistSettings, ScrapeSettings
    from corpus.scrape.fetch import Fetcher
    from corpus.urls.rules import UrlRules

    # hosts need names, because numeric private addresses are refused
    names = {urlsplit(urls[0]).netloc: f"site{number}.example" for number, urls in enumerate(hosts)}
    settings = ScrapeSettings(
        resolve={name: address for address, name in names.items()}, host_delay=0, obey_robots=obey_robots
    )

    async def run() -> None:
        async with Fetcher(settings, UrlRules(BlacklistSettings())) as fetcher:

            async def one(urls: Sequence[str]) -> None:
                for url in urls:
                    parts = urlsplit(url)
                    page = await fetcher.fetch(parts._replace(netloc=names[parts.netloc]).geturl())
                    fetcher.slots.release()
                    _whole(page.status, page.body)

            await asyncio.gather(*map(one, hosts))

    asyncio.run(run())


def fetcher(hosts: Hosts) -> None:
    """The Fetcher of corpus.scrape: URL rules, deadlines, caps, address checks, one request per host at a time."""
    _fetcher(hosts, obey_robots=False)


def fetcher_obeying(hosts: Hosts) -> None:
    """The same with robots.txt: one more request per host, one lookup per page."""
    _fetcher(hosts, obey_robots=True)


def timed(client: Client, hosts: Hosts) -> tuple[float, float]:
    """(seconds, CPU seconds) that a client takes for all pages, on another core than the server; without imports."""
    pin(1)
    client([hosts[0][:1]])  # imports and other first-time work
    started, cpu = time.perf_counter(), time.process_time()
    client(hosts)
    return time.perf_counter() - started, time.process_time() - cpu
