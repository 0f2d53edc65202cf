import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import EmptyResultError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.extract.extractors import Extracted
from corpus.scrape import offline
from corpus.scrape.__main__ import scrape
from corpus.scrape.offline import checked_pages, extract_archives
from corpus.scrape.pages import Outcome
from corpus.scrape.response import FetchedPage
from demo.build import build_site
from demo.pages import Host, page_html
from demo.serve import serve
from tests.conftest import Command
from tests.helpers import assert_one_line_error, prose, read_shard
from tests.warc_records import http, record, write_warc

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "main")
RULES = BlacklistSettings()


def article(number: int) -> bytes:
    return http(page_html(HOST, f"Story {number}", prose(number, 150), number=number).encode())


def extracted(*paths: Path, output: Path, workers: int = 1, allow_empty: bool = False) -> Stats:
    rejects = output.with_name(f"{output.name}.rejects.jsonl")
    return extract_archives(
        paths, output, ScrapeSettings(), RULES, rejects=rejects, workers=workers, allow_empty=allow_empty
    )


def test_the_archive_of_a_crawl_gives_the_records_of_the_crawl(tmp_path: Path) -> None:
    build_site({f"Story {n}": prose(n, 150) for n in range(8)}, tmp_path / "site")
    crawled, archive, again = (tmp_path / name for name in ("crawl.jsonl", "raw.warc.gz", "again.jsonl"))
    with serve(tmp_path / "site") as address:
        settings = ScrapeSettings(
            resolve={"*": address}, host_delay=0, page_timeout=2, retries=0, user_agent="test/1", max_bytes=1 << 20
        )
        scrape(tmp_path / "site" / "urls.txt", crawled, settings, RULES, archive=archive, workers=2)
    records = {entry["id"]: entry for entry in read_shard(crawled)}
    assert any(entry["final_url"] != entry["url"] for entry in records.values())
    stats = extracted(archive, output=again)
    assert {entry["id"]: entry for entry in read_shard(again)} == records
    assert stats.documents_out == len(records) and set(stats.reasons) <= {"extract_empty"}


def test_records_follow_the_files_and_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    files = [
        write_warc(
            tmp_path / f"{name}.warc.gz",
            *(record(f"https://{name}.example/{n}", article(n) if n % 5 else http(b"<p>")) for n in range(15)),
        )
        for name in ("b", "a")
    ]
    outputs = [tmp_path / "one.jsonl.zst", tmp_path / "three.jsonl.zst"]
    for output, workers in zip(outputs, (1, 3), strict=True):
        stats = extracted(*files, output=output, workers=workers)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    expected = [f"https://{name}.example/{n}" for name in ("b", "a") for n in range(15) if n % 5]
    assert [entry["url"] for entry in read_shard(outputs[0])] == expected
    assert stats.documents_in == 30 == stats.documents_out + stats.reasons["extract_empty"]
    assert stats.extra["extractors"] == {"trafilatura": 24}


def test_the_rules_of_a_crawl_apply_and_the_first_of_equal_urls_is_kept(tmp_path: Path) -> None:
    moved = {"X_Requested_URI": "http://old.example/start"}
    path = write_warc(
        tmp_path / "some.warc.gz",
        record("https://one.example/a", http(b"not yet", status="503 Busy")),
        record("https://one.example/a", article(1)),
        record("http://www.one.example/a#top", article(2)),
        record("https://192.168.0.1/a", article(3)),
        record("https://one.example/photo.jpg", article(4)),
        record("http://127.0.0.1/inside", article(5), **moved),
        record("http://two.example/new", article(6), **moved),
        record("http://two.example/new", article(6)),
    )
    found = [
        (url, page if isinstance(page, str) else "page") for url, page in checked_pages([path], ScrapeSettings(), RULES)
    ]
    assert found == [
        ("https://one.example/a", "http_503"),
        ("https://one.example/a", "page"),
        ("http://www.one.example/a#top", "duplicate"),
        ("https://192.168.0.1/a", "private_host"),
        ("https://one.example/photo.jpg", "extension"),
        ("http://old.example/start", "redirect_refused"),
        ("http://old.example/start", "page"),
        ("http://two.example/new", "page"),
    ]


def test_a_slow_page_delays_the_shard_but_neither_blocks_workers_nor_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offline, "_MAX_WAITING", 20)
    first = asyncio.Event()
    read, written, ahead = [0], [""][:0], []

    class Pool:
        """Extracts every page at once, except the first one."""

        def __init__(self, settings: ScrapeSettings, workers: int) -> None: ...

        async def __aenter__(self) -> "Pool":
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
            if body == b"0":
                await first.wait()
            return Extracted(body.decode(), "", "", "plain")

    def pages() -> Iterator[tuple[str, FetchedPage | str]]:
        for number in range(100):
            read[0] += 1
            ahead.append(read[0] - len(written))
            if read[0] > 20:
                first.set()
            url = f"http://one.example/{number}"
            yield url, FetchedPage(url, 200, "", (), "text/plain", b"", b"%d" % number, url)

    def settle(url: str, outcome: Outcome) -> None:
        written.append(outcome["record"]["text"])

    monkeypatch.setattr(offline, "ExtractPool", Pool)
    asyncio.run(asyncio.wait_for(offline._extract_all(pages(), ScrapeSettings(), 1, settle), 60))
    assert written == [str(number) for number in range(100)]
    assert 20 < max(ahead) <= 20 + 4


def test_a_run_without_any_page_names_the_cause_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "pages.jsonl"
    dead = write_warc(tmp_path / "dead.warc", record("http://one.example/1", http(status="404 Not Found")))
    with pytest.raises(EmptyResultError, match=r"dead\.warc: none of 1 URLs is left \(1 http_404\)"):
        extracted(dead, output=output)
    wet = write_warc(tmp_path / "texts.warc.wet", record("http://one.example/1", b"text", kind="conversion"))
    with pytest.raises(EmptyResultError, match=r"texts\.warc\.wet: no response records"):
        extracted(wet, output=output)
    assert list((tmp_path / "out").iterdir()) == []
    assert extracted(dead, wet, output=output, allow_empty=True).reasons == {"http_404": 1}
    assert output.read_bytes() == b""


def test_the_command_takes_folders_and_reports_errors_in_one_line(command: Command, tmp_path: Path) -> None:
    folder, output = tmp_path / "warc", tmp_path / "pages.jsonl.zst"
    folder.mkdir()
    write_warc(folder / "1.warc.gz", record("https://one.example/1", article(1)))
    cut = write_warc(folder / "2.warc.gz", record("https://one.example/2", article(2)))
    arguments = ["--output", output, "--stats", tmp_path / "stats.json", "--warc"]
    result = command("corpus.scrape", *arguments, folder)
    assert result.returncode == 0, result.stderr
    assert [entry["title"] for entry in read_shard(output)] == ["Story 1", "Story 2"]
    output.unlink()
    cut.write_bytes(cut.read_bytes()[:-7])
    assert_one_line_error(command("corpus.scrape", *arguments, folder), "2.warc.gz", "byte 0")
    assert_one_line_error(command("corpus.scrape", *arguments, tmp_path / "*.none"), "*.none", "matches no file")
    assert_one_line_error(command("corpus.scrape", *arguments, folder, "--archive", tmp_path / "x"), "--archive")
    assert not output.exists()
