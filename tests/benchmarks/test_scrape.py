from argparse import Namespace
from collections.abc import Iterator

import pytest

from benchmarks import clients, loopback
from benchmarks.scrape import _bodies, _samples, _scrape, measure

CLIENTS = [
    clients.requests_sequential,
    clients.requests_threads,
    clients.httpx_tasks,
    clients.aiohttp_tasks,
    clients.fetcher,
    clients.fetcher_obeying,
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with loopback.web(_bodies(None)) as port:
        yield port


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_fetches_every_page_and_notices_one_that_is_missing(client: clients.Client, port: int) -> None:
    if client is clients.httpx_tasks and clients.HTTPX is None:
        pytest.skip("no httpx: it is a peer, not a dependency")
    hosts = [[f"http://{address}:{port}/page/{number}" for number in range(3)] for address in loopback.addresses(3)]
    client(hosts)
    with pytest.raises(Exception, match="404"):
        client([*hosts, [f"http://{loopback.addresses()[0]}:{port}/absent"]])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pages(port: int) -> None:
    pages = 6000
    with _scrape(port, pages, pages // 4, workers=2) as (process, journal):
        samples = [sample for sample in _samples(process, journal) if sample.worker_bytes]
    early = next(sample for sample in samples if sample.pages >= pages // 4)
    for key in ("fetch_bytes", "worker_bytes"):
        assert getattr(samples[-1], key) < 1.1 * getattr(early, key)
    assert max(sample.all_bytes for sample in samples) < 1 << 30


@pytest.mark.slow
def test_the_tables_name_the_peers_and_the_figures() -> None:
    options = Namespace(pages=400, rounds=1, workers=1, articles=None, memory=None)
    tables = measure(options)
    for part in ("requests, 32 threads", "1.00 x", "corpus.scrape's Fetcher", "of the remaining CPU"):
        assert part in tables
    assert "all processes" in measure(Namespace(**{**vars(options), "memory": 400}))
