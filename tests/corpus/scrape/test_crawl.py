import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
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
from tests.rude_server import Server, kept, reply, rude_server

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
    watch: Callable[[], Awaitable[None]] | None = None,
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
                watching = asyncio.ensure_future(watch()) if watch is not None else None
                await crawling.crawl(queues.queues.values())
                if watching is not None:
                    watching.cancel()
            outcomes = [cache.outcome(position).get("reason", "ok") for position in range(len(urls))]
            return ["host_parked" if n in crawling.parked else outcome for n, outcome in enumerate(outcomes)]

    return asyncio.run(run())


def test_a_host_that_fails_in_a_row_is_parked_and_affects_no_other(tmp_path: Path) -> None:
    pages = {f"ill.example/{n}": BUSY for n in range(40)} | {f"good.example/{n}": kept(b"good") for n in range(40)}
    with rude_server(pages) as server:
        outcomes = crawl(tmp_path, server, [f"http://{name}" for name in pages], host_failures=10)
    assert outcomes == ["http_503"] * 10 + ["host_parked"] * 30 + ["ok"] * 40
    assert sum(name.startswith("ill.") for name in server.requested) == 10


def test_only_failures_of_the_host_count_and_any_other_response_resets_the_count(tmp_path: Path) -> None:
    dead, same = rude.redirect("http://dead.other/"), rude.redirect("http://www.ill.example/")
    answers = [
        (BUSY, "http_503"), (reply(status="429 Too Many Requests"), "http_429"), (GONE, "http_410"),
        (rude.reset, "connection"), (BUSY, "http_503"), (reply(b"<p>fine</p>"), "ok"),
        (BUSY, "http_503"), (BUSY, "http_503"), (reply(Content_Type="image/png"), "content_type"),
        (dead, "http_503"), (dead, "http_503"), (BUSY, "http_503"),  # two of them are another site's
        (same, "http_503"), (BUSY, "http_503"), (kept(b"never asked"), "host_parked"),  # the third in a row
    ]  # fmt: skip
    pages = {f"ill.example/{n}": page for n, (page, _) in enumerate(answers)}
    with rude_server({**pages, "dead.other/": BUSY, "www.ill.example/": BUSY}) as server:
        outcomes = crawl(tmp_path, server, [f"http://{name}" for name in pages], host_failures=3)
    assert outcomes == [reason for _, reason in answers]


def test_a_host_is_parked_at_the_same_page_wherever_a_run_was_killed(tmp_path: Path) -> None:
    behaviours = [BUSY, BUSY, kept(b"a"), BUSY, BUSY, GONE, BUSY, BUSY, BUSY, kept(b"b"), BUSY]
    pages = {f"ill.example/{n}": page for n, page in enumerate(behaviours)}
    urls = [f"http://{name}" for name in pages]
    with rude_server(pages) as server:
        undisturbed = crawl(tmp_path, server, urls, host_failures=3)
        assert undisturbed[-3:] == ["http_503", "host_parked", "host_parked"]
        whole = (tmp_path / "x.journal").read_bytes().splitlines(keepends=True)
        for finished in range(1, len(whole)):
            # pages are extracted while the next one fails: a killed run may lack one in the middle
            for lacking in {1, finished // 2 + 1, finished}:
                lines = whole[:lacking] + whole[lacking + 1 : finished + 1]
                (tmp_path / "x.journal").write_bytes(b"".join(lines))
                assert crawl(tmp_path, server, urls, host_failures=3) == undisturbed


def test_thousands_of_urls_on_one_host_do_not_starve_others_or_fill_memory(tmp_path: Path) -> None:
    page = kept(b"one of many")
    many = {f"many.example/{n}": page for n in range(2000)}
    few = {f"site{n}.example/{k}": page for n in range(50) for k in range(4)}
    tasks = 0

    async def watch() -> None:
        nonlocal tasks
        while True:
            tasks = max(tasks, len(asyncio.all_tasks()))
            await asyncio.sleep(0)

    with rude_server({**many, **few}) as server:
        urls = [f"http://{name}" for name in (*many, *few)]
        assert crawl(tmp_path, server, urls, concurrency=16, watch=watch) == ["ok"] * len(urls)
        requested = server.requested
    assert max(requested.index(name) for name in few) < 1000  # the large host takes one turn in sixteen until then
    assert tasks < 100


def test_archive_and_journal_are_synced_in_this_order_and_a_disk_that_fails_ends_the_crawl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size))

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", sync)
    with rude_server({"one.example/": kept(b"a page")}) as server:
        assert crawl(tmp_path, server, ["http://one.example/"], archive=True) == ["ok"]
    sizes = [(path.name, path.stat().st_size) for path in (tmp_path / "x.warc.gz", tmp_path / "x.journal")]
    assert sizes[0] in synced and synced.index(sizes[0]) < synced.index(sizes[1])  # the journal refers to the archive
    monkeypatch.setattr(os, "fsync", full)
    with rude_server({"two.example/": rude.silence}) as server, pytest.raises(OSError, match="no space"):
        crawl(tmp_path, server, ["http://two.example/"], page_timeout=500, read_timeout=500)


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

    pages = {f"site{n}.example/": rude.raw(damaged()) for n in range(300)}
    with rude_server(pages) as server:
        outcomes = crawl(tmp_path, server, [f"http://{name}" for name in pages], archive=True)
    assert "unexpected" not in outcomes
    assert {"ok", "bad_response", "connection", "content_type", "redirect_refused", "http_429"} <= set(outcomes)
    with (tmp_path / "x.warc.gz").open("rb") as file:
        assert sum(record.rec_type == "response" for record in ArchiveIterator(file)) == outcomes.count("ok")
