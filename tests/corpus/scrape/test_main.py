import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from warcio.archiveiterator import ArchiveIterator

from common.errors import ConfigError, EmptyResultError, InputError
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.scrape.__main__ import scrape
from corpus.urls.url import document_id
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
        assert (tmp_path / f"{name}.jsonl.zst.journal.zst").stat().st_size < 1.5 * len(shards[-1]) + 2000
    assert shards[0] == shards[1] and rejects[0] == rejects[1]
    records = read_shard(output)
    places = [listed.index(record["url"]) for record in records]
    assert places == sorted(places)
    assert all(record["id"] == document_id(record["url"]) for record in records)
    story, number = records[0]["title"].split()
    assert story == "Story" and prose(int(number), 150) in records[0]["text"]
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


KILLS = [3, pytest.param(20, marks=pytest.mark.slow)]
ILL_HOST, PAGES_A_HOST = 7, 50


def large_site(folder: Path, count: int) -> Path:
    """Short pages, a few of them HTML, on several hosts, one of which starts to fail; every 23rd URL is a dead link."""
    urls = [f"https://site{n // PAGES_A_HOST}.example/story/{n}" for n in range(count)]
    pages = []
    for n, url in enumerate(urls):
        if n // PAGES_A_HOST == ILL_HOST and n % PAGES_A_HOST >= 20:
            pages.append(Page(url, b"", 503))
        elif n % 40 == 0:
            pages.append(Page(url, article(n)))
        elif n % 23:
            pages.append(Page(url, f"Story {n}, in a few words.".encode(), headers={"Content-Type": "text/plain"}))
    write_site(folder, pages, urls)
    return folder


@pytest.mark.parametrize("kills", KILLS)
def test_killed_at_random_moments_gives_the_same_bytes_and_repeats_no_finished_page(kills: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    rng = random.Random(seed)
    count = 2000
    site = large_site(tmp_path / "site", count)
    whole, cut, archive = tmp_path / "whole.jsonl.zst", tmp_path / "cut.jsonl.zst", tmp_path / "cut.warc.gz"
    rejects = {path: path.with_suffix(".rejects") for path in (whole, cut)}
    journal = Path(f"{cut}.journal")
    requested: list[str] = []
    finished: set[str] = set()
    with serve(site, requested) as address:
        undisturbed = run(address, site / "urls.txt", whole, rejects=rejects[whole])
        requested.clear()
        for moment in sorted(rng.sample(range(1, count - 200), kills)):  # even the last kill must come before the end
            options: list[str | Path] = ["--urls", site / "urls.txt", "--output", cut, "--archive", archive]
            options += ["--rejects", rejects[cut], "--resolve", f"*={address}", "--config", config(tmp_path)]
            with started(*options) as process:
                wait_for_lines(journal, 1 + max(moment, len(finished) + 1), process)  # the first line is the header
                time.sleep(rng.uniform(0, 0.03))
                kill_all(process, rng)
            assert not cut.exists() and not finished & set(requested)
            finished = {line["url"].removeprefix("https://") for line in lines_of(journal)}
            with journal.open("ab") as file, archive.open("ab") as torn:  # as if a line and a record were half written
                file.write(b'{"url":')
                torn.write(b"\x1f\x8b\x08 torn")
            requested.clear()
        stats = run(address, site / "urls.txt", cut, archive=archive, rejects=rejects[cut])
    assert cut.read_bytes() == whole.read_bytes()
    assert rejects[cut].read_bytes() == rejects[whole].read_bytes()
    assert stats.extra["resumed"] == len(finished) > 0 and not finished & set(requested)
    assert sorted(archived(archive)) == sorted(record["final_url"] for record in read_shard(cut))
    assert stats.reasons == undisturbed.reasons and stats.reasons["host_parked"] == PAGES_A_HOST - 20 - 10
    assert stats.extra["hosts"] == undisturbed.extra["hosts"]


@contextlib.contextmanager
def started(*options: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """The running command, in its own process group."""
    command = [sys.executable, "-m", "corpus.scrape", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, process_group=0, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_all(process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """kill -9 a scrape and its workers one by one in any order, as a batch system does at the end of a job."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    rng.shuffle(family)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
        time.sleep(rng.choice([0, 0, 0.01, 0.1]))
    process.wait()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_scrape_stops_at_once_on_a_signal_and_can_resume(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    output, journal = tmp_path / "pages.jsonl.zst", tmp_path / "pages.jsonl.zst.journal"
    released = threading.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        while not released.is_set():
            await asyncio.sleep(0.01)
        await reply(article(1))(writer)

    pages = {f"site{n}.example/": reply(article(n)) for n in range(10)} | {f"late{n}.example/": late for n in range(10)}
    hanging = {f"hanging{n}.example/": rude.silence for n in range(10)}
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in (*pages, *hanging)))
    with rude_server({**pages, **hanging}) as server:
        options: list[str | Path] = ["--urls", urls, "--output", output, "--workers", "2"]
        options += ["--resolve", f"*={server.address}", "--config", config(tmp_path)]
        with started(*options) as process:
            wait_for_lines(journal, 1 + 10, process)
            workers = psutil.Process(process.pid).children(recursive=True)
            assert len(workers) >= 2
            if signum != signal.SIGINT:  # a batch system sends it to every process of a job, in any order
                for worker in workers:
                    worker.send_signal(signum)
            released.set()
            wait_for_lines(journal, 1 + 20, process)
            process.send_signal(signum)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert errors.count("note: 20 of 30 URLs are done") == 1 and "Traceback" not in errors
        assert not psutil.wait_procs(workers, timeout=30)[1]
        assert not output.exists() and all("record" in line for line in lines_of(journal))
        stats = run(server.address, urls, output, page_timeout=0.3)
    assert stats.documents_out == stats.extra["resumed"] == 20 and stats.reasons == {"timeout": 10}


def config(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"run: {folder}\nurls: [x]\nscrape: {{host_delay: 0, retries: 1, retry_delay: 0.02}}\n")
    return path


def lines_of(journal: Path) -> list[dict[str, Any]]:
    """The lines of a journal about URLs, without a torn last line."""
    lines = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [line for line in lines if "url" in line]


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    """Wait until a journal has `count` lines, or the process that writes it is gone."""
    deadline = time.monotonic() + 60
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_bad_servers_affect_no_other_page(tmp_path: Path) -> None:
    bad = {
        "a.example/": rude.silence,
        "b.example/": rude.reset,
        "c.example/": rude.gzip_bomb(30_000_000),
        "d.example/": reply(b"<html></html>"),
    }
    good = {f"good.example/{n}": reply(article(n)) for n in range(10)}
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in (*bad, *good)))
    with rude_server({**bad, **good}) as server:
        stats = run(server.address, urls, tmp_path / "pages.jsonl.zst", page_timeout=3, obey_robots=False)
    assert stats.documents_out == 10
    assert stats.reasons == {"timeout": 1, "connection": 1, "too_large": 1, "extract_empty": 1}


def test_more_connections_may_stay_open_than_the_shell_allows_files(tmp_path: Path) -> None:
    pages = {f"site{n}.example/": rude.kept(b"a plain text") for n in range(200)}
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in pages))
    with rude_server(pages) as server:
        options = f"--urls {urls} --output {tmp_path}/pages.jsonl.zst --config {config(tmp_path)}"
        command = f"ulimit -Sn 100; {sys.executable} -m corpus.scrape {options} --resolve '*={server.address}'"
        result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "200 of 200 documents kept" in result.stdout, result


def test_encodings_come_from_header_then_page_then_bytes(tmp_path: Path) -> None:
    story = "Zażółć gęślą jaźń, powiedział pan Ólafur. " * 8
    html = "<html><head>{}<title>Story</title></head><body><article><p>{}</p></article></body></html>"
    meta = '<meta charset="iso-8859-2">'
    pages = {
        "header.example/": reply(html.format("", story).encode("iso8859_2"), Content_Type="text/html; charset=latin2"),
        "meta.example/": reply(html.format(meta, story).encode("iso8859_2")),
        "unknown.example/": reply(html.format("", story).encode(), Content_Type="text/html; charset=us-ascii-7"),
        "lying.example/": reply(html.format("", story).encode("cp1250"), Content_Type="text/html; charset=utf-8"),
        "plain.example/": reply(story.encode("utf-16"), Content_Type="text/plain"),
    }
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in pages))
    with rude_server(pages) as server:
        run(server.address, urls, tmp_path / "pages.jsonl.zst")
    texts = {record["url"]: record["text"].strip() for record in read_shard(tmp_path / "pages.jsonl.zst")}
    assert texts == {f"http://{name}": story.strip() for name in pages}


def test_the_largest_hosts_have_statistics(command: Command, tmp_path: Path) -> None:
    plain = reply(b"a plain text", Content_Type="text/plain")
    pages = {f"large.example/{n}": plain for n in range(4)} | {f"small{n:02}.example/": plain for n in range(25)}
    names = [*sorted(pages, reverse=True), *(f"large.example/dead/{n}" for n in range(3))]
    urls = list_of(tmp_path / "urls.txt", *(f"http://{name}" for name in names))
    with rude_server({**pages, "large.example/dead/1": reply(Content_Type="image/png")}) as server:
        options = ["--output", tmp_path / "pages.jsonl.zst", "--stats", tmp_path / "stats.json"]
        options += ["--resolve", f"*={server.address}", "--config", config(tmp_path)]
        result = command("corpus.scrape", "--urls", urls, *options)
    hosts = json.loads((tmp_path / "stats.json").read_text())["hosts"]
    assert list(hosts) == ["large.example", *(f"small{n:02}.example" for n in range(24, 5, -1))]
    assert hosts["large.example"] == {"urls": 7, "ok": 4, "bytes": 48, "reasons": {"http_404": 2, "content_type": 1}}
    assert hosts["small24.example"] == {"urls": 1, "ok": 1, "bytes": 12, "reasons": {}}
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["largest", "hosts", "URLs", "ok", "MB", "failed"] and len(lines) == 22
    assert lines[2].split(maxsplit=4) == ["large.example", "7", "4", "0.00", "2 http_404, 1 content_type"]


def test_a_public_host_is_not_contacted_without_a_contact(tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://mapped.example/page", "http://public.example/page")
    settings = ScrapeSettings(resolve={"mapped.example": "127.0.0.1:9"})
    with pytest.raises(ConfigError, match=r"scrape\.contact is empty.*public\.example"):
        scrape(urls, tmp_path / "pages.jsonl.zst", settings, BlacklistSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["urls.txt"]


def test_a_run_without_any_page_names_the_reasons_and_the_next_one_tries_again(tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://one.example/1", "http://one.example/2", "http://one.example/3.jpg")
    output = tmp_path / "pages.jsonl.zst"
    with rude_server({}) as server:
        with pytest.raises(EmptyResultError, match=r"urls\.txt: none of 3 URLs is left \(2 http_404, 1 extension"):
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


def test_a_list_that_is_not_utf8_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_bytes(b"http://one.example/\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"urls\.txt:2: not UTF-8"):
        run("127.0.0.1:9", tmp_path / "urls.txt", tmp_path / "pages.jsonl.zst")


def test_the_command_reports_errors_in_one_line(command: Command, tmp_path: Path) -> None:
    urls = list_of(tmp_path / "urls.txt", "http://one.example/1")
    arguments = ["--urls", urls, "--output", tmp_path / "out" / "pages.jsonl.zst"]
    assert_one_line_error(command("corpus.scrape", *arguments), "scrape.contact", "one.example")
    assert_one_line_error(command("corpus.scrape", *arguments, "--resolve", "one.example"), "HOST=IP:PORT")
    bad_address = command("corpus.scrape", *arguments, "--resolve", "one.example=localhost:80")
    assert_one_line_error(bad_address, "scrape.resolve", "localhost:80", "ip:port")
    assert_one_line_error(command("corpus.scrape", "--urls", tmp_path / "none.txt", *arguments[2:]), "none.txt")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_real_pages_are_scraped_under_their_real_urls(shared_data: Path, tmp_path: Path) -> None:
    count = write_real_site(shared_data, tmp_path / "site", every=6)
    with serve(tmp_path / "site") as address:
        stats = run(address, tmp_path / "site" / "urls.txt", tmp_path / "pages.jsonl.zst", workers=2, page_timeout=30)
    assert stats.documents_out >= count - 1, stats  # a host or two is on the blacklist
    assert stats.bytes_out / stats.documents_out > 2000
