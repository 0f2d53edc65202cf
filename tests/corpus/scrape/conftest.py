from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from common.errors import PageError
from common.settings import ScrapeSettings
from common.workers import Workers
from corpus.extract.extractors import Extracted, load_extractors
from corpus.extract.pool import extract_allowed
from corpus.scrape.response import FetchedPage
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


class NoWorkers(Workers):
    """Everything runs in this process."""

    def start(self) -> None:
        pass

    def submit(self, function: Callable[[Any], Any], item: Any) -> "Future[Any]":
        future = Future[Any]()
        future.set_result(function(item))
        return future


def extract_here(settings: ScrapeSettings, page: FetchedPage) -> Extracted | str:
    try:
        return extract_allowed(page, settings, load_extractors(settings.extractors))
    except PageError as error:
        return error.reason


@pytest.fixture
def quick_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extract in this process."""
    monkeypatch.setattr("corpus.scrape.crawl.Workers", NoWorkers)
    monkeypatch.setattr("corpus.scrape.pages.extract_in_child", extract_here)
