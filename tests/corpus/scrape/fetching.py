"""Fetch from a loopback server, all URLs at once, by a clock that only waits move."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import PageError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.fetch import Fetcher
from corpus.scrape.response import FetchedPage
from corpus.urls.rules import UrlRules
from tests.rude_server import Behaviour, Server

HTML = b"<html><body><p>Hello</p></body></html>"


def settings_for(server: Server, timeout: float = 60, **changes: Any) -> ScrapeSettings:
    """Settings without delays. `timeout`: seconds after which a page that hangs fails."""
    quick = {"host_delay": 0, "retries": 2, "retry_delay": 0.02, "page_timeout": timeout, "read_timeout": timeout}
    return ScrapeSettings(**{"resolve": {"*": server.address}, **quick, **changes})


def fetch(
    settings: ScrapeSettings,
    *urls: str,
    allow_private: bool = False,
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> list[FetchedPage | str]:
    """Fetch all URLs at once; returns the page or the reason of each."""

    async def one(fetcher: Fetcher, url: str) -> FetchedPage | str:
        try:
            page = await fetcher.fetch(url)
        except PageError as error:
            return error.reason
        fetcher.slots.release()
        return page

    async def every() -> list[FetchedPage | str]:
        async with Fetcher(settings, UrlRules(BlacklistSettings(allow_private_hosts=allow_private))) as fetcher:
            return await asyncio.gather(*(one(fetcher, url) for url in urls))

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(every())


class Clock(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while the fetcher sleeps, and then at once."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Visits:
    """When a server was asked, by the clock of `fetch`: only sleeps take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []
        sleep = asyncio.sleep

        async def skip(delay: float) -> None:
            loop = asyncio.get_running_loop()
            if not isinstance(loop, Clock):
                return await sleep(delay)  # the server's
            loop.now += max(delay, 0.0)
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", skip)

    def noted(self, behaviour: Behaviour) -> Behaviour:
        """A behaviour that notes when it was asked for."""

        async def behave(writer: asyncio.StreamWriter) -> object:
            self.times.append(round(self.clock.now, 3))
            return await behaviour(writer)

        return behave

    def fetch(self, server: Server, *urls: str, **changes: Any) -> list[str]:
        """Fetch all URLs from time 0 on; returns `page` or the reason of each."""
        self.times, self.clock = [], Clock()
        patient = {"page_timeout": 1e6, "read_timeout": 1e6, "connect_timeout": 1e6, "obey_robots": False}
        settings = settings_for(server, **{**patient, **changes})
        outcomes = fetch(settings, *urls, loop=lambda: self.clock)
        return ["page" if isinstance(outcome, FetchedPage) else outcome for outcome in outcomes]


def lookup_at(server: Server) -> Callable[..., list[tuple[Any, ...]]]:
    """A fake `socket.getaddrinfo` that knows one address, and that nowhere.example has none."""
    ip, port = server.address.split(":")

    def lookup(host: str, *_: object) -> list[tuple[Any, ...]]:
        if host == "nowhere.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, int(port)))]

    return lookup
