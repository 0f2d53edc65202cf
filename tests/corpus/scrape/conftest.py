import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from common.settings import ScrapeSettings
from corpus.extract.extractors import Extracted, extract, load_extractors
from tests.corpus.scrape.fetching import Visits
from tests.corpus.scrape.shards import PAGES
from tests.rude_server import Server, rude_server


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits(monkeypatch)


@pytest.fixture
def server() -> Iterator[Server]:
    """The small web of `shards`."""
    with rude_server(PAGES) as server:
        yield server


class Pool(contextlib.AsyncExitStack):
    """Extraction in this process, with the libraries loaded."""

    def __init__(self, settings: ScrapeSettings, workers: int) -> None:
        super().__init__()
        self.extractors = load_extractors(settings.extractors)

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        await asyncio.sleep(0)
        return extract(body, content_type, url, self.extractors)


@pytest.fixture
def quick_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extract in this process."""
    monkeypatch.setattr("corpus.scrape.crawl.ExtractPool", Pool)
