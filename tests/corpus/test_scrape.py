import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from warcio.archiveiterator import ArchiveIterator

from common.errors import ConfigError, EmptyResultError, InputError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.scrape import scrape
from corpus.urls import document_id
from demo.build import build_site
from demo.pages import Host, page_html
from demo.serve import serve
from demo.site import Page, write_site
from tests import rude_server as rude
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error, prose, read_shard
from tests.real_site import write_real_site
from tests.rude_server import reply, rude_server

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "main")


def article(number: int) -> bytes:
    return page_html(HOST, f"Story {number}", prose(number, 150), number=number).encode()


def small_site(folder: Path, count: int, delay: float = 0.0) -> Path:
    """Articles on ten hosts, every seventh URL a dead link."""
    urls = [f"https://site{n % 10}.example/story/{n}" for n in range(count)]
    pages = [Page(url, article(n), delay=delay) for n, url in enumerate(urls) if n % 7 != 6]
    write_site(folder, pages, urls)
    return folder


def run(address: str, urls: Path, output: Path, *, workers: int = 1, **changes: Any) -> Stats:
    options = {key: changes.pop(key) for key in ("archive", "rejects", "allow_empty") if key in changes}
    quick = {"host_delay": 0, "retries": 1, "retry_delay": 0.02, "page_timeout": 2, "resolve": {"*": address}}
    return scrape(urls, output, ScrapeSettings(**{**quick, **changes}), BlacklistSettings(), workers=workers, **options)


def list_of(path: Path, *urls: str) -> Path:
    path.write_text("".join(f"{url}\n" for url in urls))
    return path


def archived(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [
            record.rec_headers.get_header("WARC-Target-URI")
            for record in ArchiveIterator(file)
            if record.rec_type == "response"
        ]


def test_records_follow_the_list_and_bytes_depend_on_nothing_but_the_site(tmp_path: Path) -> None:
    build_site({f"Story {n}": prose(n, 150) for n in range(12)}, tmp_path / "site")
    list_file = tmp_path / "site" / "urls.txt"
    listed = list_file.read_text().split("\n")
    shards, rejects = [], []
    for name, workers, concurrency in (("a", 1, 1), ("b", 2, 64)):
        output, rejected = tmp_path / f"{name}.jsonl.zst", tmp_path / f"{name}.rejects.jsonl.zst"
        with serve(tmp_path / "site") as address:  # another port each time
            stats = run(address, list_file, output, rejects=rejected, workers=workers, concurrency=concurrency)
        shards.append(output.read_bytes())
        rejects.append(rejected.read_bytes())
        assert not (tmp_path / f"{name}.jsonl.zst.journal").exists()
    assert shards[0] == shards[1] and rejects[0] == rejects[1]
    records = read_shard(output)
    places = [listed.index(record["url"]) for record in records]
    assert places == sorted(places)
    assert all(record["id"] == document_id(record["url"]) for record in records)
    assert records[0]["title"] == "Story 0" and prose(0, 150) in records[0]["text"]
    moved = next(record for record in records if record["url"].endswith("/old-address"))
    assert moved["final_url"] == "https://corner.example/new-address"
    assert stats.documents_in == stats.documents_out + stats.reasons.total() and stats.documents_out == len(records)
    assert stats.extra["extractors"] == {"trafilatura": len(records) - 1, "plain": 1}
    assert {name: stats.reasons[name] for name in ("timeout", "robots", "http_404", "http_503", "duplicate")} == {
        "timeout": 1,
        "robots": 1,
        "http_404": 1,
        "http_503": 1,
        "duplicate": 3,
    }


def test_killed_and_resumed_gives_the_same_bytes_and_repeats_no_finished_page(tmp_path: Path) -> None:
    site = small_site(tmp_path / "site", 80, delay=0.05)
    urls = (site / "urls.txt").read_text().split()
    whole, cut, archive = tmp_path / "whole.jsonl.zst", tmp_path / "cut.jsonl.zst", tmp_path / "cut.warc.gz"
    journal = Path(f"{cut}.journal")
    requested: list[str] = []
    with serve(site, requested) as address:
        run(address, site / "urls.txt", whole)
        finished: set[str] = set()
        for threshold in (10, 30, 50):
            options: list[str | Path] = ["--urls", site / "urls.txt", "--output", cut, "--archive", archive]
            options += ["--resolve", f"*={address}", "--config", config(tmp_path)]
            command = [sys.executable, "-m", "corpus.scrape", *options]
            with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
                wait_for_lines(journal, 1 + threshold)  # the first line names the run
                os.killpg(process.pid, signal.SIGKILL)
            assert not cut.exists()
            assert not finished & set(requested)
            lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
            finished |= {urls[line["position"]].removeprefix("https://") for line in lines}
            with journal.open("ab") as file, archive.open("ab") as torn:  # as if a line and a record were half written
                file.write(b'{"position":')
                torn.write(b"\x1f\x8b\x08 torn")
            requested.clear()
        stats = run(address, site / "urls.txt", cut, archive=archive)
    assert cut.read_bytes() == whole.read_bytes()
    assert stats.extra["resumed"] == len(finished) >= 50
    assert not finished & set(requested) and len(requested) >= 80 - len(finished)
    assert sorted(archived(archive)) == sorted(record["final_url"] for record in read_shard(cut))


def config(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"run: {folder}\nurls: [x]\nscrape: {{host_delay: 0, retries: 1, retry_delay: 0.02}}\n")
    return path


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_journal_of_another_list_is_not_believed(tmp_path: Path) -> None:
    site = small_site(tmp_path / "site", 12)
    output = tmp_path / "pages.jsonl.zst"
    stale = Path(f"{output}.journal")
    stale.write_text('{"urls":"another","settings":"x","archive":false}\n{"position":0,"archive":0,"reason":"dns"}\n')
    with serve(site) as address:
        stats = run(address, site / "urls.txt", output)
    assert stats.extra["resumed"] == 0 and stats.reasons == {"http_404": 1}


def test_a_page_that_breaks_its_server_harms_no_other(tmp_path: Path) -> None:
    bad = {
        "a.example/": rude.silence,
        "b.example/": rude.reset,
        "c.example/": rude.gzip_bomb(30_000_000),
        "d.example/": reply(b"<html></html>"),
    }
    good = {f"good.example/{n}": reply(article(n)) for n in range(10)}
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in (*bad, *good)))
    with rude_server({**bad, **good}) as server:
        stats = run(server.address, urls, tmp_path / "pages.jsonl.zst", page_timeout=0.5, obey_robots=False)
    assert stats.documents_out == 10
    assert stats.reasons == {"timeout": 1, "connection": 1, "too_large": 1, "extract_empty": 1}


def test_a_public_host_is_not_contacted_without_a_contact(tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://mapped.example/page", "http://public.example/page")
    settings = ScrapeSettings(resolve={"mapped.example": "127.0.0.1:9"})
    with pytest.raises(ConfigError, match=r"scrape\.contact is empty.*public\.example"):
        scrape(urls, tmp_path / "pages.jsonl.zst", settings, BlacklistSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["urls.txt"]


def test_a_run_without_any_page_names_the_reasons_and_starts_afresh_next_time(tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://one.example/1", "http://one.example/2", "http://one.example/3.jpg")
    output = tmp_path / "pages.jsonl.zst"
    with rude_server({}) as server:
        with pytest.raises(EmptyResultError, match=r"urls\.txt: no text from any of 3 URLs \(2 http_404, 1 extension"):
            run(server.address, urls, output)
        assert [path.name for path in tmp_path.iterdir()] == ["urls.txt"]
        stats = run(server.address, urls, output, allow_empty=True)
    assert read_shard(output) == [] and stats.reasons.total() == 3


def test_an_empty_list_is_an_error_unless_allowed(tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "", "  ")
    with pytest.raises(InputError, match="no URLs inside"):
        run("127.0.0.1:9", urls, tmp_path / "pages.jsonl.zst")
    run("127.0.0.1:9", urls, tmp_path / "pages.jsonl.zst", allow_empty=True)
    assert read_shard(tmp_path / "pages.jsonl.zst") == []


def test_a_list_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_bytes(b"http://one.example/\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"urls\.txt:2: not UTF-8"):
        run("127.0.0.1:9", tmp_path / "urls.txt", tmp_path / "pages.jsonl.zst")


def test_the_command_says_in_one_line_what_is_wrong(command: Command, tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://one.example/1")
    arguments = ["--urls", urls, "--output", tmp_path / "out" / "pages.jsonl.zst"]
    assert_one_line_error(command("corpus.scrape", *arguments), "scrape.contact", "one.example")
    assert_one_line_error(command("corpus.scrape", *arguments, "--resolve", "one.example"), "HOST=IP:PORT")
    bad_address = command("corpus.scrape", *arguments, "--resolve", "one.example=localhost:80")
    assert_one_line_error(bad_address, "scrape.resolve", "localhost:80", "ip:port")
    assert_one_line_error(command("corpus.scrape", "--urls", tmp_path / "none.txt", *arguments[2:]), "none.txt")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_real_pages_are_scraped_under_their_own_names(shared_data: Path, tmp_path: Path) -> None:
    count = write_real_site(shared_data, tmp_path / "site", every=6)
    with serve(tmp_path / "site") as address:
        stats = run(address, tmp_path / "site" / "urls.txt", tmp_path / "pages.jsonl.zst", workers=2, page_timeout=30)
    assert stats.documents_out >= count - 1, stats  # a host or two is on the blacklist
    assert stats.bytes_out / stats.documents_out > 2000
