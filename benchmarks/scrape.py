"""Scraping from a loopback server with 200 hosts and a latency of 5 ms: clients that fetch, and a whole scrape.

The server has its own process and core. Its hosts are loopback addresses (127.0.1.1, …; on Linux all of 127.0.0.0/8 is
this machine), so that clients open one connection per host, as on the web. Each client fetches the pages of a host one
after the other. The whole scrape is `python -m corpus.scrape` with two workers.
"""

import asyncio
import contextlib
import multiprocessing
import os
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import Contender, Row, Timed, compare, run_command
from common.files import write_json

_HOSTS = 200
_ADDRESSES = [f"127.0.1.{1 + number}" for number in range(_HOSTS)]
_CONNECTIONS = 256  # scrape.concurrency's default
Hosts = Sequence[Sequence[str]]
"""URLs: one list per host."""


def _serve(listener: socket.socket, bodies: Sequence[bytes]) -> None:
    """Answer on kept-alive connections. Only the path is parsed, so that the server is never the bottleneck."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    head = b"HTTP/1.1 %s\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has ended
            while request := await reader.readuntil(b"\r\n\r\n"):
                number = request.split(b" ", 2)[1].removeprefix(b"/page/")
                body = bodies[int(number) % len(bodies)] if number.isdigit() else b""
                await asyncio.sleep(0.005)
                writer.write(head % (b"200 OK" if body else b"404 Not Found", len(body)) + body)

    async def serve() -> None:
        await (await asyncio.start_server(answer, sock=listener, backlog=4096)).serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def web(bodies: Sequence[bytes]) -> Iterator[int]:
    """Serve `/page/N` from another process; yields the port, which is the same on every host."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, bodies), daemon=True)
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------------ the clients


def requests_threads(hosts: Hosts) -> None:
    """requests over 32 threads; each fetches all pages of a host over one connection."""
    import requests

    def one(urls: Sequence[str]) -> None:
        with requests.Session() as session:
            for url in urls:
                assert session.get(url, timeout=30).content

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, hosts))


def _one_task_per_host(hosts: Hosts, client: Any, fetch: Callable[[Any, str], Awaitable[bytes]]) -> None:
    async def run() -> None:
        async with client() as session:

            async def one(urls: Sequence[str]) -> None:
                for url in urls:
                    assert await fetch(session, url)

            await asyncio.gather(*map(one, hosts))

    asyncio.run(run())


def httpx_tasks(hosts: Hosts) -> None:
    """httpx, one task per host."""
    import httpx2 as httpx

    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)

    async def fetch(client: Any, url: str) -> bytes:
        content: bytes = (await client.get(url)).content
        return content

    _one_task_per_host(hosts, lambda: httpx.AsyncClient(limits=limits, timeout=30), fetch)


def aiohttp_tasks(hosts: Hosts) -> None:
    """aiohttp with its defaults, one task per host: no limits, no checks, no robots.txt."""
    import aiohttp

    async def fetch(session: aiohttp.ClientSession, url: str) -> bytes:
        async with session.get(url) as answer:
            return await answer.read()

    make = aiohttp.ClientSession
    _one_task_per_host(hosts, lambda: make(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)), fetch)


def fetcher(hosts: Hosts) -> None:
    """The Fetcher of corpus.scrape: robots.txt, URL rules, deadlines, caps, checks, one request per host at a time."""
    from common.settings import BlacklistSettings, ScrapeSettings
    from corpus.scrape.fetch import Fetcher
    from corpus.urls.rules import UrlRules

    # hosts need names, because numeric private addresses are refused
    names = {urlsplit(urls[0]).netloc: f"site{number}.example" for number, urls in enumerate(hosts)}
    settings = ScrapeSettings(resolve={name: address for address, name in names.items()}, host_delay=0)

    async def fetch(fetcher: Fetcher, url: str) -> bytes:
        parts = urlsplit(url)
        page = await fetcher.fetch(parts._replace(netloc=names[parts.netloc]).geturl())
        fetcher.slots.release()
        return page.body

    _one_task_per_host(hosts, lambda: Fetcher(settings, UrlRules(BlacklistSettings())), fetch)


def fetching(client: Callable[[Hosts], None], hosts: Hosts) -> Timed:
    """Fetch all pages, on another core than the server."""
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, {cores[1]})
    client([hosts[0][:1]])  # imports and other first-time work
    return lambda: client(hosts)


# ------------------------------------------------------------------------------------------------ whole scrapes


def scraping(port: int, pages: int, folder: Path) -> Timed:
    """A whole command, start of Python included; its CPU seconds are those of all its processes."""
    folder = Path(mkdtemp(dir=folder))  # each round scrapes again
    resolve = {f"site{number}.example": f"{address}:{port}" for number, address in enumerate(_ADDRESSES)}
    write_json(
        folder / "config.yaml", {"run": str(folder), "urls": ["-"], "scrape": {"resolve": resolve, "host_delay": 0}}
    )
    urls, output = folder / "urls.txt", folder / "pages.jsonl.zst"
    urls.write_text("".join(f"http://site{n % _HOSTS}.example/page/{n}\n" for n in range(pages)))
    words = ("--workers", 2, "--urls", urls, "--output", output, "--config", folder / "config.yaml")
    return lambda: run_command("corpus.scrape", *words)


def measure(arguments: Namespace) -> Iterator[Row]:
    """Fetching beside requests, httpx and bare aiohttp; then a whole scrape."""
    from workflow.demo.articles import python_articles
    from workflow.demo.pages import Host, page_html

    host = Host("one.example", "The One", "A site of sorts", ("Home", "News", "Contact"), "main")
    bodies = [page_html(host, title, text).encode() for title, text in python_articles().items()]
    yield {"different pages": len(bodies), "kB on average": sum(map(len, bodies)) / len(bodies) / 1000}
    each = max(1, arguments.count // _HOSTS)
    with web(bodies) as port:
        hosts = [
            [f"http://{address}:{port}/page/{_HOSTS * n + number}" for n in range(each)]
            for number, address in enumerate(_ADDRESSES)
        ]
        clients = {
            "requests, 32 threads": requests_threads,
            "aiohttp, asyncio, bare": aiohttp_tasks,
            "corpus.scrape's Fetcher": fetcher,
            "httpx2, asyncio": httpx_tasks,
        }
        contenders = [
            Contender(label, fetching, (client, hosts), bar=2.8 if client is fetcher else None)
            for label, client in clients.items()
        ]
        yield from compare("client", contenders, arguments.rounds, each * _HOSTS, "pages")
        whole = [Contender("python -m corpus.scrape, 2 workers", scraping, (port, arguments.count, arguments.work))]
        yield from compare("whole scrape", whole, arguments.rounds, arguments.count, "pages")
