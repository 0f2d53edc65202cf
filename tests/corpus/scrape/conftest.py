import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from common.settings import ScrapeSettings
from corpus.extract.extractors import Extracted, load_extractors
from corpus.extract.pool import extract_allowed
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
        self.settings, self.extractors = settings, load_extractors(settings.extractors)

    async def extract(self, *request: Any) -> Extracted:
        await asyncio.sleep(0)
        return extract_allowed(request, self.settings, self.extractors)  # type: ignore[arg-type]


@pytest.fixture
def quick_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extract in this process."""
    monkeypatch.setattr("corpus.scrape.crawl.ExtractPool", Pool)
