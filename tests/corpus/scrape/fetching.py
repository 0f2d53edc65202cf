"""Fetch from a loopback server, all URLs at once."""

import asyncio
from typing import Any

from common.errors import PageError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.fetch import Fetcher
from corpus.scrape.response import FetchedPage
from corpus.urls.rules import UrlRules
from tests.rude_server import Server

HTML = b"<html><body><p>Hello</p></body></html>"


def settings_for(server: Server, **changes: Any) -> ScrapeSettings:
    quick = {"host_delay": 0, "retries": 2, "retry_delay": 0.02, "page_timeout": 0.6, "read_timeout": 0.4}
    return ScrapeSettings(**{"resolve": {"*": server.address}, **quick, **changes})


def fetch(settings: ScrapeSettings, *urls: str, allow_private: bool = False) -> list[FetchedPage | str]:
    """Fetch all URLs at once; returns the page or the reason of each."""

    async def one(fetcher: Fetcher, url: str) -> FetchedPage | str:
        try:
            page = await fetcher.fetch(url)
        except PageError as error:
            return error.reason
        fetcher.slots.release()
        return page

    async def every() -> list[FetchedPage | str]:
        async with Fetcher(settings, UrlRules(BlacklistSettings()), allow_private) as fetcher:
            return await asyncio.gather(*(one(fetcher, url) for url in urls))

    return asyncio.run(every())
