"""What is kept of a crawl: lists that change, keys that change, archives, and a network that is down."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, EmptyResultError, InputError, OutageError, PageError
from common.files import read_lines
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.extract.extractors import Extracted, NothingExtracted, extract, load_extractors
from corpus.scrape.__main__ import scrape
from demo.pages import Host, page_html
from tests import rude_server as rude
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error, prose, read_shard
from tests.rude_server import Behaviour, Server, redirect, reply, rude_server

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "main")
DOWN = "127.0.0.1:9"
BUSY = reply(status="503 Service Unavailable")
BIG = 60_000


def article(number: int) -> Behaviour:
    return reply(page_html(HOST, f"Story {number}", prose(number, 150), number=number).encode())


PAGES: dict[str, Behaviour] = {
    **{f"site{n % 4}.example/{n}": article(n) for n in range(12)},
    "plain.example/": reply(b"a plain text", Content_Type="text/plain"),
    "empty.example/": reply(b"<html></html>"),
    "big.example/": reply(b"b " * BIG, Content_Type="text/plain"),
    "moved.example/": redirect("http://middle.example/"),
    "middle.example/": redirect("http://site1.example/1"),
    "far.example/": redirect("http://moved.example/"),
    "video.example/": redirect("http://www.youtube.com/watch"),
    "secret.example/robots.txt": reply(b"User-agent: *\nDisallow: /", Content_Type="text/plain"),
    "secret.example/": article(90),
    "secret.example/2": article(91),
    "reset.example/": rude.reset,
    "ill.example/good": article(92),
    **{f"ill.example/{n}": BUSY for n in range(5)},
}
URLS = [
    *(f"http://{name}" for name in PAGES if not name.endswith("robots.txt")),
    "http://www.site1.example/1#top",
    "http://site2.example/photo.jpg",
    "http://site3.example/404",
]


class Shard:
    """The files of one shard in a folder, scraped again and again."""

    def __init__(self, folder: Path, name: str = "pages") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.output, self.rejects = self.folder / "x.jsonl.zst", self.folder / "x.rejects"
        self.journal = self.folder / "x.jsonl.zst.journal"
        self.settled = self.folder / "x.jsonl.zst.journal.zst"
        self.agreed = self.folder / "x.jsonl.zst.settings.json"
        self.warc = self.folder / "x.warc.gz"

    def run(self, address: str, urls: list[str] | None = None, **changes: Any) -> Stats:
        options = {key: changes.pop(key) for key in ("archive", "allow_empty", "refetch", "site") if key in changes}
        options["archive"] = self.warc if options.get("archive") else None
        rules = BlacklistSettings(**changes.pop("blacklist", {}))
        quick: dict[str, Any] = {"host_delay": 0, "retries": 0, "page_timeout": 5, "host_failures": 3}
        settings = ScrapeSettings(**{"resolve": {"*": address}, **quick, **changes})
        path = self.folder / "urls.txt"
        path.write_text("".join(f"{url}\n" for url in (URLS if urls is None else urls)))
        return scrape(path, self.output, settings, rules, rejects=self.rejects, **options)

    def bytes(self) -> tuple[bytes, bytes]:
        return self.output.read_bytes(), self.rejects.read_bytes()

    def lose_outputs(self) -> None:
        """As Snakemake does before it runs a rule again."""
        self.output.unlink()
        self.rejects.unlink()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with rude_server(PAGES) as server:
        yield server


class Pool:
    """Extraction in this process, whose libraries are loaded."""

    def __init__(self, settings: ScrapeSettings, workers: int) -> None:
        self.extractors = load_extractors(settings.extractors)

    async def __aenter__(self) -> "Pool":
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        await asyncio.sleep(0)
        try:
            return extract(body, content_type, url, self.extractors)
        except NothingExtracted as nothing:
            raise PageError(str(nothing)) from None


@pytest.fixture(autouse=True)
def quick_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.scrape.crawl.ExtractPool", Pool)


FRESH: dict[str, tuple[bytes, bytes]] = {}


def fresh(tmp_path: Path, server: Server, **changes: Any) -> tuple[bytes, bytes]:
    """What a scrape that knows nothing gives."""
    if str(changes) not in FRESH:
        shard = Shard(tmp_path, f"fresh{len(FRESH)}")
        shard.run(server.address, **changes)
        FRESH[str(changes)] = shard.bytes()
    return FRESH[str(changes)]


# ------------------------------------------------------------------------------------------------ the same list


@pytest.mark.parametrize("archive", [False, True])
def test_keys_that_do_not_change_a_page_fetch_nothing_and_change_nothing(
    archive: bool, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path)
    first = shard.run(server.address, archive=archive)
    before = shard.bytes()
    files = {path: path.stat().st_mtime_ns for path in (shard.settled, shard.warc) if path.exists()}
    assert len(files) == 1 + archive and not shard.journal.exists()
    for changes in (
        {},
        {"contact": "me@example.org"},
        {"user_agent": "other/2"},
        {"connect_timeout": 1, "read_timeout": 1, "page_timeout": 1},
        {"extract_timeout": 99},
        {"host_delay": 5, "retries": 4, "retry_delay": 9, "concurrency": 1},
        {"resolve": {"*": "127.0.0.1:10"}},
        {"host_failures": 1},
        {"host_failures": 50},
        {"max_redirects": 9},
        {"max_bytes": 1 << 30},
        {"archive": not archive},
        {"allow_empty": True},
    ):
        monkeypatch.setattr("corpus.scrape.__main__.version", lambda name: "99")
        shard.lose_outputs()
        stats = shard.run(DOWN, **{"archive": archive, **changes})
        assert shard.bytes() == before, changes
        assert stats.extra["fetched"] == stats.extra["extracted_again"] == 0
        assert stats.extra["hosts"] == first.extra["hosts"] and stats.reasons == first.reasons
        assert stats.extra["libraries"]["lxml"] == "99"
        assert {path: path.stat().st_mtime_ns for path in files} == files
        assert not shard.journal.exists()
    if not archive:
        assert not shard.warc.exists()


# ------------------------------------------------------------------------------------------------ other lists


def test_whatever_is_done_to_a_list_only_new_urls_are_fetched_and_the_bytes_are_those_of_a_fresh_scrape(
    tmp_path: Path, server: Server
) -> None:
    shard, rng = Shard(tmp_path), random.Random(7)
    lists = [
        URLS[:15],
        URLS,
        URLS[::-1],
        rng.sample(URLS, len(URLS)),
        [url for url in URLS if "site2" not in url] + ["http://site2.example/1000"],
        ["http://new.example/", *URLS, *URLS[:3]],
        [url.replace("http://site0", "http://SITE0") + "#part" for url in URLS],
    ]
    asked: set[str] = set()
    for urls in lists:
        server.requested.clear()
        stats = shard.run(server.address, urls, host_failures=3)
        pages = [name for name in server.requested if not name.endswith("robots.txt")]
        now = {name for name in pages if name.split("/")[0] not in ("middle.example", "moved.example")}
        assert not now & asked - {"site1.example/1"}, "the one that redirects lead to"
        asked |= now
        assert shard.bytes() == fresh(tmp_path, server, urls=urls), urls
        assert stats.extra["fetched"] <= len(urls) and not shard.journal.exists()


def test_a_url_that_left_the_list_is_still_known_when_it_comes_back(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    whole = shard.bytes()
    shard.run(DOWN, URLS[:2])
    assert [record["url"] for record in read_shard(shard.output)] == URLS[:2]
    assert shard.run(DOWN, URLS).extra["fetched"] == 0
    assert shard.bytes() == whole


def test_an_interrupted_crawl_whose_list_changed_keeps_what_it_has(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, URLS[:12], archive=True)
    # as if killed before the shard was written
    lines = [json.loads(line) for line in unpacked(shard.settled)]
    shard.lose_outputs()
    shard.settled.unlink()
    shard.journal.write_text("".join(json.dumps(line) + "\n" for line in lines[:-2]) + '{"url": "http://to')
    server.requested.clear()
    stats = shard.run(server.address, [*URLS[:12], "http://plain.example/"])
    assert stats.extra["resumed"] == 10 and stats.extra["fetched"] == 3
    assert shard.bytes() == fresh(tmp_path, server, urls=[*URLS[:12], "http://plain.example/"])


def unpacked(path: Path) -> list[bytes]:
    return list(read_lines(path))


def test_pages_of_a_recorded_site_are_known_as_long_as_it_is_the_same(tmp_path: Path, server: Server) -> None:
    shard, site = Shard(tmp_path), tmp_path / "site"
    (site / "pages").mkdir(parents=True)
    (site / "pages" / "0").write_bytes(b"one")
    shard.run(server.address, site=site, archive=True)
    assert shard.run(DOWN, site=site, archive=True).extra["fetched"] == 0
    (site / "pages" / "0").write_bytes(b"two")
    for _ in range(2):
        with pytest.raises(OutageError):
            shard.run(DOWN, site=site, archive=True)
    assert shard.run(server.address, site=site, archive=True).extra["fetched"] == len(URLS) - 2 - 2
    assert shard.run(DOWN, site=site, archive=True).extra["fetched"] == 0
    assert shard.bytes() == fresh(tmp_path, server)


# ------------------------------------------------------------------------------------------------ other keys


def test_other_extractors_read_the_archive_and_need_no_network(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    stats = shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"]) != before
    assert stats.extra["fetched"] == 0 and stats.extra["extracted_again"] == 17  # 16 pages and one without text
    assert shard.warc.read_bytes() == warc
    shard.run(DOWN, archive=True)
    assert shard.bytes() == before


def test_without_an_archive_other_extractors_stop_and_say_what_they_would_fetch_again(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before = shard.bytes()
    server.requested.clear()
    with pytest.raises(ConfigError) as refusal:
        shard.run(server.address, extractors=["newspaper3k"])
    for part in (
        "scrape.extractors was [trafilatura, newspaper3k] and is [newspaper3k]",
        "17 URLs would be fetched again",
        "--refetch",
        str(shard.agreed),
    ):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not server.requested and shard.bytes() == before and not shard.journal.exists()
    shard.run(DOWN)  # set back
    assert shard.bytes() == before
    stats = shard.run(server.address, extractors=["newspaper3k"], refetch=True)
    assert stats.extra["fetched"] == 17
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])
    shard.run(DOWN, extractors=["newspaper3k"])  # the yes stays given
    shard.agreed.unlink()  # the yes of a Snakemake rule
    shard.run(server.address)
    assert shard.bytes() == before
    assert "17 URLs are fetched again" in capsys.readouterr().err


def test_a_yes_holds_until_all_pages_are_fetched_however_often_that_is_interrupted(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    with pytest.raises(OutageError):
        shard.run(DOWN, extractors=["newspaper3k"], refetch=True)
    shard.run(server.address, extractors=["newspaper3k"])
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])


def test_a_page_limit_can_be_lowered_and_set_back_and_what_was_too_large_is_fetched_only_when_agreed(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    whole = shard.bytes()
    small = shard.run(DOWN, max_bytes=BIG)
    assert small.reasons["too_large"] == 1 and small.extra["fetched"] == 0
    assert shard.bytes() == fresh(tmp_path, server, max_bytes=BIG)
    shard.run(DOWN)
    assert shard.bytes() == whole  # it was fetched once

    other = Shard(tmp_path, "other")
    other.run(server.address, max_bytes=BIG, archive=True)
    with pytest.raises(ConfigError, match=rf"scrape\.max_bytes was {BIG} and is {3 * BIG} \(1 URLs\): 1 URLs would be"):
        other.run(server.address, max_bytes=3 * BIG, archive=True)
    stats = other.run(server.address, max_bytes=3 * BIG, archive=True, refetch=True)
    assert stats.extra["fetched"] == 1 and stats.reasons["too_large"] == 0
    assert other.bytes() == whole


def test_more_redirects_are_followed_only_when_agreed(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    assert shard.run(server.address, max_redirects=2).reasons["too_many_redirects"] == 1
    with pytest.raises(ConfigError, match=r"scrape\.max_redirects was 2 and is 5 \(1 URLs\)"):
        shard.run(server.address)
    assert shard.run(server.address, refetch=True).extra["fetched"] == 1
    assert shard.bytes() == fresh(tmp_path, server)


def test_robots_txt_is_asked_about_known_pages_once_it_is_obeyed(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, obey_robots=False, archive=True)
    ignored = shard.bytes()
    assert "http://secret.example/" in [record["url"] for record in read_shard(shard.output)]
    with pytest.raises(OutageError):  # it cannot be asked
        shard.run(DOWN, archive=True)
    assert shard.bytes() == ignored
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert all(name.endswith("/robots.txt") for name in server.requested) and stats.extra["fetched"] == 0
    assert shard.bytes() == fresh(tmp_path, server) and stats.reasons["robots"] == 2
    shard.run(DOWN, archive=True)
    shard.settled.unlink()
    shard.run(server.address, archive=True)  # the archive knows, too
    assert shard.bytes() == fresh(tmp_path, server)
    stats = shard.run(server.address, obey_robots=False, archive=True)  # their pages are there
    assert shard.bytes() == ignored and stats.extra["fetched"] == 0


def test_url_rules_are_no_facts_about_pages(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before = shard.bytes()
    for rules in ({"extra_domains": ["site1.example"]}, {"extra_domains": ["middle.example"]}, {"min_length": 22}):
        shard.run(DOWN, blacklist=rules)
        assert shard.bytes() == fresh(tmp_path, server, blacklist=rules) != before, rules
    shard.run(DOWN)
    assert shard.bytes() == before


# ------------------------------------------------------------------------------------------------ the archive


def test_a_finished_archive_alone_is_a_source(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    for path in shard.folder.iterdir():
        if path != shard.warc:
            path.unlink()
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert shard.bytes() == before and shard.warc.read_bytes() == warc
    assert stats.extra["extracted_again"] == 19
    assert not {"site0.example/0", "plain.example/", "big.example/", "moved.example/"} & set(server.requested)


def test_an_archive_that_is_switched_on_late_says_what_it_lacks_and_takes_only_new_pages(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, URLS[:6])
    assert shard.run(server.address, URLS[:9], archive=True).extra["fetched"] == 3
    assert "6 known pages are not in" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"6 URLs would be fetched again"):
        shard.run(server.address, URLS[:9], archive=True, extractors=["newspaper3k"])
    with pytest.raises(ConfigError, match=r"9 URLs would be fetched again, 3 of them are in its archive"):
        shard.run(server.address, URLS[:9], extractors=["newspaper3k"])
    stats = shard.run(server.address, URLS[:9], archive=True, extractors=["newspaper3k"], refetch=True)
    assert (stats.extra["fetched"], stats.extra["extracted_again"]) == (6, 3)


def test_an_archive_that_is_gone_or_damaged_is_told(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    shard.warc.write_bytes(warc[:-100])
    with pytest.raises(InputError, match="shorter than the journal"):
        shard.run(server.address, archive=True)
    damaged = bytearray(warc)
    damaged[len(warc) // 2] ^= 0xFF
    shard.warc.write_bytes(damaged)
    with pytest.raises(InputError, match=r"the record at byte \d+ \(http.*\) is damaged"):
        shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    stats = shard.run(server.address, archive=True, extractors=["newspaper3k"], refetch=True)
    assert stats.extra["fetched"] == 1 and shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])
    shard.warc.unlink()
    shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    assert "is gone; the texts of its pages are known" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="17 URLs would be fetched again;"):
        shard.run(DOWN, archive=True)
    assert shard.run(server.address, archive=True, refetch=True).extra["fetched"] == 17
    assert shard.bytes() == before and shard.run(DOWN, archive=True).extra["fetched"] == 0


# ------------------------------------------------------------------------------------------------ outages


def test_a_shard_none_of_whose_hosts_answers_is_an_outage_and_leaves_nothing(
    command: Command, tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    for count in (1, len(URLS)):
        with pytest.raises(OutageError, match=r"urls\.txt: no host answered: "):
            shard.run(DOWN, URLS[:count], allow_empty=True, archive=True)
        assert [path.name for path in shard.folder.iterdir()] == ["urls.txt"]
    config = tmp_path / "config.yaml"
    config.write_text("run: x\nurls: [x]\nscrape: {retries: 0, host_delay: 0}\n")
    arguments = ["--urls", shard.folder / "urls.txt", "--output", shard.output, "--config", config, "--allow-empty"]
    result = command("corpus.scrape", *arguments, "--resolve", f"*={DOWN}")
    assert_one_line_error(result, "no host answered: 29 URLs of 14 sites failed (29 connection)", "run it again")
    shard.run(server.address)
    assert shard.bytes() == fresh(tmp_path, server)


@pytest.mark.parametrize("behaviour", [rude.silence, rude.reset])
def test_servers_that_accept_and_say_nothing_are_no_answer(behaviour: Behaviour, tmp_path: Path) -> None:
    with rude_server({f"a.example/{n}": behaviour for n in ("", "robots.txt")}) as server:
        with pytest.raises(OutageError):
            Shard(tmp_path).run(server.address, ["http://a.example/"], page_timeout=0.2, allow_empty=True)


def test_hosts_that_answer_with_errors_are_no_outage(tmp_path: Path) -> None:
    with rude_server({f"a.example/{n}": BUSY for n in ("", "robots.txt")}) as server:
        stats = Shard(tmp_path).run(server.address, ["http://a.example/"], allow_empty=True)
        assert stats.reasons == {"robots_unreachable": 1}
        with pytest.raises(EmptyResultError, match="none of 1 URLs is left"):
            Shard(tmp_path, "strict").run(server.address, ["http://a.example/"])


def test_a_network_that_is_down_while_a_changed_list_is_tried_is_an_outage(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before, settled = shard.bytes(), shard.settled.read_bytes()
    for more in (
        [f"http://new{n}.example/" for n in range(100)],
        [f"http://new.example/{n}" for n in range(100)],
        ["http://site0.example/new"],
    ):
        with pytest.raises(OutageError, match="nor 3 that answered before; this is not recorded"):
            shard.run(DOWN, [*URLS, *more], allow_empty=True)
        assert shard.bytes() == before and shard.settled.read_bytes() == settled and not shard.journal.exists()
        shard.run(server.address, [*URLS, *more])
        assert shard.bytes() == fresh(tmp_path, server, urls=[*URLS, *more])
        shard.settled.write_bytes(settled)
        shard.run(DOWN)


def test_dead_sites_that_are_added_to_a_list_are_no_outage(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    dead = {f"dead{n}.example": DOWN for n in range(5)}
    one = shard.run(DOWN, [*URLS, "http://dead0.example/"])
    assert one.reasons["connection"] == 2 and one.extra["fetched"] == 1
    urls = [*URLS, *(f"http://{name}/{n}" for name in dead for n in range(6))]
    server.requested.clear()
    stats = shard.run(server.address, urls, resolve={"*": server.address, **dead})
    assert len(server.requested) == 1 and server.requested[0].endswith("/robots.txt"), "one witness is asked"
    assert stats.reasons["connection"] == 1 + 15 and stats.reasons["host_parked"] == 2 + 15
    assert shard.run(DOWN, urls).extra["fetched"] == 0


def test_a_network_that_goes_down_on_the_way_makes_no_page_a_failure(tmp_path: Path) -> None:
    names = [f"a{n}.example/{k}" for n in range(4) for k in ("robots.txt", 0, 1, 2)]
    answered = 0

    async def while_it_lasts(writer: asyncio.StreamWriter) -> object:
        nonlocal answered
        answered += 1
        return await (article(answered) if answered < 9 else rude.reset)(writer)

    shard, urls = Shard(tmp_path), [f"http://{name}" for name in names if "robots" not in name]
    with rude_server(dict.fromkeys(names, while_it_lasts)) as server:
        with pytest.raises(OutageError, match=r"no host answered: .* that answered before"):
            shard.run(server.address, urls)
        answered = -99
        stats = shard.run(server.address, urls)
    assert stats.documents_out == 12 and 0 < stats.extra["resumed"] <= 8


# ------------------------------------------------------------------------------------------------ the end of a run


@pytest.mark.parametrize(
    "place",
    ["corpus.scrape.journal.write_frames", "corpus.scrape.frames.atomic_path", "corpus.scrape.__main__.Stats.finish"],
)
def test_a_kill_while_the_shard_is_finished_changes_nothing(
    place: str, tmp_path: Path, server: Server, command: Command
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    for path in shard.folder.iterdir():
        if path not in (shard.warc, shard.folder / "urls.txt"):
            path.unlink()
    settings = tmp_path / "config.yaml"
    settings.write_text("run: x\nurls: [x]\nscrape: {retries: 0, host_delay: 0, page_timeout: 5, host_failures: 3}\n")
    # kill -9 from inside, at the very call
    (tmp_path / "killed.py").write_text(
        "import os, signal, sys, importlib\n"
        "from corpus.scrape import __main__ as scrape, frames, journal\n"
        f"path = {place!r}.split('.')\n"
        "target = importlib.import_module('.'.join(path[:2]))\n"
        "for part in path[2:-1]: target = getattr(target, part)\n"
        "setattr(target, path[-1], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))\n"
        "scrape.main(sys.argv[1:])\n"
    )
    arguments = ["--urls", shard.folder / "urls.txt", "--output", shard.output, "--rejects", shard.rejects]
    arguments += ["--archive", shard.warc, "--config", settings, "--resolve", f"*={server.address}"]
    arguments += ["--stats", shard.folder / "stats.json"]
    killed = subprocess.run([sys.executable, tmp_path / "killed.py", *map(str, arguments)], cwd=ROOT, timeout=120)
    assert killed.returncode == -9
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert shard.bytes() == before and shard.warc.read_bytes() == warc
    assert not server.requested and stats.extra["fetched"] == 0 and not list(shard.folder.glob("*.tmp"))
    assert not shard.journal.exists() and shard.settled.exists()
