import asyncio
import base64
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from corpus.scrape.archive import read_pages
from corpus.urls.url import document_id
from tests import rude_server as rude
from tests.conftest import ROOT
from tests.corpus.scrape.shards import BUSY, PLAIN, URLS, Shard, article
from tests.helpers import assert_one_line_error, called, new_seed, prose, read_rejects, read_shard, wait_for
from tests.rude_server import Behaviour, Server, reply, rude_server
from tests.slurm.lab.processes import alive


def test_records_follow_the_list_and_bytes_depend_on_nothing_but_the_site(tmp_path: Path, server: Server) -> None:
    shards = [Shard(tmp_path, name) for name in "ab"]
    for shard, workers, concurrency in zip(shards, (1, 2), (1, 64), strict=True):
        stats = shard.run(server.address, workers=workers, concurrency=concurrency)
    assert shards[0].bytes() == shards[1].bytes()
    records = read_shard(shard.output)
    places = [URLS.index(record["url"]) for record in records]
    assert places == sorted(places) and [record["id"] for record in records] == [document_id(URLS[n]) for n in places]
    assert records[0]["title"] == "Story 0" and prose(0, 150) in records[0]["text"] and records[0]["date"]
    moved = next(record for record in records if record["url"] == "http://far.example/")
    assert moved["final_url"] == "http://site1.example/1" and moved["text"] == records[1]["text"]
    url = "http://plain.example/"
    content_hash = f"sha1:{base64.b32encode(hashlib.sha1(PLAIN.encode('iso8859_2')).digest()).decode()}"
    expected = {"id": document_id(url), "url": url, "title": "", "extractor": "plain", "final_url": url}
    expected |= {"text": PLAIN, "content_hash": content_hash}
    assert expected in records
    assert (stats.documents_in, stats.documents_out) == (len(URLS), len(records)) == (31, 18)
    assert Counter(record["extractor"] for record in records) == {"plain": 2, "trafilatura": 16}
    assert stats.reasons == {
        **{"extract_empty": 1, "redirect_refused": 1, "robots": 2, "connection": 1, "http_503": 3, "host_parked": 2},
        **{"duplicate": 1, "extension": 1, "http_404": 1},
    }
    hosts = stats.extra["hosts"]
    assert list(hosts)[:2] == ["ill.example", "site3.example"]
    assert hosts["ill.example"]["urls"] == 6 and hosts["ill.example"]["reasons"] == {"http_503": 3, "host_parked": 2}
    assert hosts["plain.example"] == {"urls": 1, "ok": 1, "bytes": len(PLAIN), "reasons": {}}
    rejects = read_rejects(shard.rejects)
    assert len(rejects) == 13
    assert {"url": "http://reset.example/", "reason": "connection"} in rejects


@contextlib.contextmanager
def started(shard: Shard, address: str, *prefix: str) -> Iterator["subprocess.Popen[str]"]:
    """The running command with an archive, in its own process group."""
    command = [*prefix, sys.executable, "-m", "corpus.scrape", *shard.arguments(address), "--archive", str(shard.warc)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, process_group=0, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    """Wait until a journal has `count` lines about URLs, or the process that writes it is gone."""
    wait_for(lambda: process.poll() is not None or (path.exists() and path.read_bytes().count(b"\n") >= count))


def kill_all(process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """kill -9 a scrape and its workers in any order, as a batch system does."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in rng.sample(family, len(family)):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
        time.sleep(rng.choice([0, 0, 0.01, 0.1]))
    process.wait()
    psutil.wait_procs(family[1:])  # a worker holds the journal's lock until it is gone


def once(released: threading.Event, behaviour: Behaviour) -> Behaviour:
    """A behaviour that waits for an event."""

    async def late(writer: asyncio.StreamWriter) -> object:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return await behaviour(writer)

    return late


def large_site(count: int, released: threading.Event) -> dict[str, Behaviour]:
    """Short pages on hosts of 40, a few HTML, some dead; the fourth host fails, the last waits."""
    plain = rude.kept(b"A story, in a few words.")
    pages = {f"site{n // 40}.example/{n}": plain if n % 40 else reply(article(n)) for n in range(count)}
    gone, busy = reply(status="404 Not Found"), list(pages)[140:160]
    pages |= dict.fromkeys(list(pages)[22::23], gone) | dict.fromkeys(busy, BUSY)
    return pages | {f"site{count // 40 - 1}.example/{count - 40}": once(released, reply(article(0)))}


@pytest.mark.parametrize(("kills", "count"), [(2, 400), pytest.param(20, 2000, marks=pytest.mark.slow)])
def test_killed_at_random_moments_gives_the_same_bytes_and_repeats_no_finished_page(
    kills: int, count: int, tmp_path: Path
) -> None:
    rng = random.Random(new_seed())
    whole, cut = Shard(tmp_path, "whole"), Shard(tmp_path, "cut")
    released = threading.Event()
    pages = large_site(count, released)
    urls = [f"http://{name}" for name in pages]
    finished: set[str] = set()
    with rude_server(pages) as server:
        released.set()
        undisturbed = whole.run(server.address, urls)
        released.clear()
        cut.write_list(urls)
        for moment in sorted(rng.sample(range(1, count - 60), kills)):
            server.requested.clear()
            with started(cut, server.address) as process:
                # all but the last host may be finished already
                wait_for_lines(cut.journal, min(max(moment, len(finished) + 1), count - 40), process)
                time.sleep(rng.uniform(0, 0.02))
                kill_all(process, rng)
            assert not cut.output.exists() and not finished & set(server.requested)
            lines = [line for line in cut.journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            finished = {line["url"].removeprefix("http://") for line in map(json.loads, lines) if "url" in line}
            with cut.journal.open("ab") as file, cut.warc.open("ab") as torn:  # as if both were cut while written
                file.write(b'{"url":')
                torn.write(b"\x1f\x8b\x08 torn")
        server.requested.clear()
        released.set()
        stats = cut.run(server.address, urls, archive=True)
        assert stats.extra["resumed"] == len(finished) > 0 and not finished & set(server.requested)
    assert cut.bytes() == whole.bytes() and stats.extra["hosts"] == undisturbed.extra["hosts"]
    responses = [url for url, _ in read_pages(cut.warc, 1 << 20)]
    assert sorted(responses) == sorted(record["final_url"] for record in read_shard(cut.output))
    assert stats.reasons == undisturbed.reasons and stats.reasons["host_parked"] == 20 - 3


@pytest.mark.usefixtures("quick_extraction")
def test_what_a_power_cut_tore_is_fetched_again_and_its_number_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(new_seed())
    whole = Shard(tmp_path, "whole")
    pages = {f"site{n}.example/": rude.kept(prose(n).encode()) for n in range(8)}
    urls = [f"http://{name}" for name in pages]
    with rude_server(pages) as server:
        whole.run(server.address, urls, archive=True)
        archive, journal = whole.warc.read_bytes(), whole.journal.read_bytes()
        for number, (tail, line) in enumerate(
            ((bytes(4096), bytes(4096)), (rng.randbytes(400), b""), (b"\x1f\x8b\x08 torn", b'{"url":'))
        ):
            for known in (0, len(journal) // 2):
                cut = Shard(tmp_path, f"{number} {known}")
                cut.warc.write_bytes(archive[: rng.randrange(10, len(archive))] + tail)
                cut.journal.write_bytes(journal[:known] + line)
                server.requested.clear()
                cut.run(server.address, urls, archive=True)
                fetched = [name for name in server.requested if not name.endswith("robots.txt")]
                assert cut.bytes() == whole.bytes()
                assert f"record; {len(fetched)} pages are fetched, lost ones again" in capsys.readouterr().err
                assert {url for url, _ in read_pages(cut.warc, 1 << 20)} >= {f"http://{name}" for name in fetched}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_scrape_stops_at_once_on_a_signal_and_can_resume(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    shard, released = Shard(tmp_path), threading.Event()
    pages: dict[str, Behaviour] = {f"site{n}.example/": reply(article(n)) for n in range(5)}
    pages |= {f"late{n}.example/": once(released, reply(article(1))) for n in range(5)}
    pages |= {f"hanging{n}.example/": rude.silence for n in range(5)}
    urls = [f"http://{name}" for name in pages]
    shard.write_list(urls)
    with rude_server(pages) as server:
        with started(shard, server.address, *(["nohup"] if signum == signal.SIGTERM else [])) as process:
            wait_for_lines(shard.journal, 5, process)
            if signum == signal.SIGTERM:
                process.send_signal(signal.SIGHUP)  # is ignored
            workers = psutil.Process(process.pid).children(recursive=True)
            assert workers
            if signum != signal.SIGINT:  # a batch system sends it to every process of a job, in any order
                for worker in workers:
                    worker.send_signal(signum)
            released.set()
            wait_for_lines(shard.journal, 10, process)
            process.send_signal(signum)
            _, errors = process.communicate()
        assert process.returncode == code and "10 of 15" in errors and "Traceback" not in errors
        wait_for(lambda: not any(map(alive, workers)))
        assert not shard.output.exists() and b"reason" not in shard.journal.read_bytes()
        stats = shard.run(server.address, urls, page_timeout=0.3, archive=True)
    assert stats.documents_out == stats.extra["resumed"] == 10 and stats.reasons.total() == 5


def test_bad_lists_addresses_and_results_are_one_line_and_leave_no_file(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    with rude_server({}) as server:
        mapped = shard.arguments(server.address)
        others = [argument for argument in mapped if "resolve" not in argument]
        for content, arguments, parts in (
            (b"http://one.example/1\nhttp://public.example/\n", [*others, "scrape.resolve={one.example: 127.0.0.1:9}"],
             ("scrape.contact", "public.example")),
            (b"http://one.example/1\n", [*mapped, "scrape.resolve={one.example: 127.0.0.1:65536}"], ("one.example",)),
            (b"http://one.example/\n\xff\xfe\n", mapped, ("urls.txt:2: ",)),
            # what a power cut leaves of a list, which may be empty in a run
            (b"", [*mapped, "--allow-empty"], ("urls.txt: an empty file", "python -m corpus.blacklist")),
            (bytes(22), [*mapped, "--allow-empty"], ("urls.txt:1: zeros", "python -m corpus.blacklist")),
            (b"http://one.example/1\nhttp://one.example/2\nhttp://one.example/3.jpg\n", mapped,
             ("urls.txt: ", "of 3 URLs", "2 http_404, 1 extension")),
        ):  # fmt: skip
            shard.urls.write_bytes(content)
            assert_one_line_error(called("corpus.scrape", *arguments), *parts)
            assert list(shard.folder.iterdir()) == [shard.urls]
        # nothing was recorded: the next run tries again
        assert called("corpus.scrape", *mapped, "--allow-empty").returncode == 0
        assert read_shard(shard.output) == [] and server.requested.count("one.example/1") == 2
