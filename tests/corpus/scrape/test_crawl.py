import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from warcio.archiveiterator import ArchiveIterator

from common.progress import Meter
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.extract.extractors import Extracted
from corpus.scrape.archive import Archive
from corpus.scrape.crawl import Crawl
from corpus.scrape.fetch import Fetcher
from corpus.scrape.journal import Journal
from corpus.scrape.outcome_cache import OutcomeCache, outcome_settings
from corpus.scrape.queues import sort_into_queues
from corpus.urls.rules import UrlRules
from tests import rude_server as rude
from tests.rude_server import Behaviour, Server, kept, reply, rude_server

BUSY = reply(status="503 Service Unavailable")
GONE = reply(status="410 Gone")


class InstantPool:
    """Extraction that takes no time."""

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        return Extracted(body.decode("latin-1"), "", "", "plain")


def crawl(
    folder: Path,
    server: Server,
    urls: list[str],
    *,
    archive: bool = False,
    watch: Callable[[Crawl], Awaitable[None]] | None = None,
    **changes: Any,
) -> list[str]:
    """Crawl URLs, resuming the journal in `folder`; returns `ok` or the reason of each."""
    quick = {"host_delay": 0, "retries": 0, "retry_delay": 0.02, "page_timeout": 20, "obey_robots": False}
    settings = ScrapeSettings(**{"resolve": {"*": server.address}, **quick, **changes})
    rules = UrlRules(BlacklistSettings())
    queues = sort_into_queues(urls, rules)

    async def run() -> list[str]:
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(Journal(folder / "x", urls, queues.keys, outcome_settings(settings)))
            raw = stack.enter_context(Archive(folder / "x.warc.gz", journal.archive_end)) if archive else None
            journal.adopt(raw.new_responses if raw else ())
            cache = OutcomeCache(journal, settings, rules, archive)
            meter = stack.enter_context(Meter("scrape", "pages"))
            async with Fetcher(settings, rules) as fetcher:
                crawling = Crawl(fetcher, InstantPool(), cache, raw, meter)  # type: ignore[arg-type]
                watching = asyncio.ensure_future(watch(crawling)) if watch is not None else None
                await crawling.crawl(queues.queues.values())
                if watching is not None:
                    watching.cancel()
            outcomes = [cache.outcome(position).get("reason", "ok") for position in range(len(urls))]
            return ["host_parked" if n in crawling.parked else outcome for n, outcome in enumerate(outcomes)]

    return asyncio.run(run())


def host_with(outcomes: Mapping[str, Behaviour], name: str = "ill.example") -> tuple[dict[str, Behaviour], list[str]]:
    """Pages of one host with these behaviours, and their URLs."""
    return {f"{name}/{path}": page for path, page in outcomes.items()}, [f"http://{name}/{path}" for path in outcomes]


def test_a_host_that_fails_in_a_row_is_parked_and_affects_no_other(tmp_path: Path) -> None:
    pages, urls = host_with({str(n): BUSY for n in range(40)})
    good = {f"good.example/{n}": kept(b"good") for n in range(40)}
    with rude_server({**pages, **good}) as server:
        outcomes = crawl(tmp_path, server, [*urls, *(f"http://{name}" for name in good)], host_failures=10)
    assert outcomes == ["http_503"] * 10 + ["host_parked"] * 30 + ["ok"] * 40
    assert sum(name.startswith("ill.") for name in server.requested) == 10


def test_only_failures_of_the_host_count_and_any_other_response_resets_the_count(tmp_path: Path) -> None:
    behaviours = {
        "1": BUSY, "2": reply(status="429 Too Many Requests"), "3": GONE,
        "4": rude.reset, "5": BUSY, "6": reply(b"<p>fine</p>"),
        "7": BUSY, "8": BUSY, "9": reply(Content_Type="image/png"),
        "10": rude.redirect("http://dead.other/"), "11": rude.redirect("http://dead.other/"), "12": BUSY,
        "13": rude.redirect("http://www.ill.example/"), "14": BUSY, "15": kept(b"never asked"),
    }  # fmt: skip
    elsewhere = {"dead.other/": BUSY, "www.ill.example/": BUSY}
    pages, urls = host_with(behaviours)
    with rude_server({**pages, **elsewhere}) as server:
        outcomes = crawl(tmp_path, server, urls, host_failures=3)
    assert outcomes == [
        "http_503", "http_429", "http_410",
        "connection", "http_503", "ok",
        "http_503", "http_503", "content_type",
        "http_503", "http_503", "http_503",  # two of them are another site's
        "http_503", "http_503", "host_parked",  # the third in a row, one after a redirect within the site
    ]  # fmt: skip


def test_a_host_is_parked_at_the_same_page_wherever_a_run_was_killed(tmp_path: Path) -> None:
    behaviours = [BUSY, BUSY, kept(b"a"), BUSY, BUSY, GONE, BUSY, BUSY, BUSY, kept(b"b"), BUSY]
    pages, urls = host_with({str(n): page for n, page in enumerate(behaviours)})
    with rude_server(pages) as server:
        undisturbed = crawl(tmp_path, server, urls, host_failures=3)
        assert undisturbed[-3:] == ["http_503", "host_parked", "host_parked"]
        whole = (tmp_path / "x.journal").read_bytes().splitlines(keepends=True)
        for finished in range(1, len(whole)):
            # pages are extracted while the next one fails: a killed run may lack one in the middle
            for lacking in range(1, finished + 1):
                lines = whole[:lacking] + whole[lacking + 1 : finished + 1]
                (tmp_path / "x.journal").write_bytes(b"".join(lines))
                assert crawl(tmp_path, server, urls, host_failures=3) == undisturbed


def test_ten_thousand_urls_on_one_host_do_not_starve_others_or_fill_memory(tmp_path: Path) -> None:
    page = kept(b"one of many")
    many = {f"many.example/{n}": page for n in range(10_000)}
    few = {f"site{n}.example/{k}": page for n in range(50) for k in range(4)}
    tasks = 0

    async def watch(crawling: Crawl) -> None:
        nonlocal tasks
        while True:
            tasks = max(tasks, len(asyncio.all_tasks()))
            await asyncio.sleep(0.01)

    with rude_server({**many, **few}) as server:
        urls = [f"http://{name}" for name in (*many, *few)]
        assert crawl(tmp_path, server, urls, concurrency=16, watch=watch) == ["ok"] * len(urls)
        requested = server.requested
    assert max(requested.index(name) for name in few) < 2000  # the large host takes one turn in sixteen until then
    assert tasks < 100


def test_a_thousand_failures_without_a_request_let_other_tasks_run(tmp_path: Path) -> None:
    turns = 0

    async def watch(crawling: Crawl) -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    urls = [f"http://ill.example/{n}" for n in range(1000)]
    with rude_server({"ill.example/robots.txt": BUSY}) as server:
        outcomes = crawl(tmp_path, server, urls, obey_robots=True, watch=watch)
        assert server.requested == ["ill.example/robots.txt"]
    assert outcomes == ["robots_unreachable"] * 10 + ["host_parked"] * 990
    assert turns > 990


def test_a_disk_that_fails_ends_the_crawl_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(journal: Journal) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Journal, "sync", full)
    with rude_server({"one.example/": rude.silence}) as server:
        with pytest.raises(OSError, match="no space"):
            crawl(tmp_path, server, ["http://one.example/"], page_timeout=500, read_timeout=500)


def test_randomly_damaged_responses_give_pages_or_reasons_and_can_be_archived(tmp_path: Path) -> None:
    rng = random.Random(1)
    sound = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 12\r\n\r\n<p>hello</p>",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n<p>hi\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://other.example:80/a%20b?c=d#e\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n",
    ]

    def damaged() -> bytes:
        answer = bytearray(rng.choice(sound))
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(answer))
            answer[start : start + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        return bytes(answer)

    pages = {f"site{n}.example/": rude.raw(damaged()) for n in range(500)}
    with rude_server(pages) as server:
        outcomes = crawl(tmp_path, server, [f"http://{name}" for name in pages], archive=True)
    assert "unexpected" not in outcomes
    assert {"ok", "bad_response", "connection", "content_type", "redirect_refused", "http_429"} <= set(outcomes)
    with (tmp_path / "x.warc.gz").open("rb") as file:
        assert sum(record.rec_type == "response" for record in ArchiveIterator(file)) == outcomes.count("ok")
