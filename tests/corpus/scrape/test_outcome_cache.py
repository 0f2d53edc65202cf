"""Which outcomes of earlier runs are used again: lists that change, keys that change."""

import json
import random
from pathlib import Path

import pytest

from common.errors import ConfigError, OutageError
from common.files import read_lines
from tests.corpus.scrape.shards import BIG, DOWN, URLS, Shard, fresh
from tests.helpers import read_shard
from tests.rude_server import Server

pytestmark = pytest.mark.usefixtures("quick_extraction")


# ------------------------------------------------------------------------------------------------ the same list


@pytest.mark.parametrize("archive", [False, True])
def test_keys_that_do_not_change_a_page_fetch_nothing_and_change_nothing(
    archive: bool, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path)
    first = shard.run(server.address, archive=archive)
    before = shard.bytes()
    files = {path: path.stat().st_mtime_ns for path in (shard.finished_journal, shard.warc) if path.exists()}
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


def test_with_another_list_only_new_urls_are_fetched_and_the_bytes_are_those_of_a_fresh_scrape(
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
    lines = [json.loads(line) for line in unpacked(shard.finished_journal)]
    shard.lose_outputs()
    shard.finished_journal.unlink()
    shard.journal.write_text("".join(json.dumps(line) + "\n" for line in lines[:-2]) + '{"url": "http://to')
    server.requested.clear()
    stats = shard.run(server.address, [*URLS[:12], "http://plain.example/"])
    assert stats.extra["resumed"] == 10 and stats.extra["fetched"] == 3
    assert shard.bytes() == fresh(tmp_path, server, urls=[*URLS[:12], "http://plain.example/"])


def unpacked(path: Path) -> list[bytes]:
    return list(read_lines(path))


def test_pages_of_a_recorded_site_are_known_while_it_is_unchanged(tmp_path: Path, server: Server) -> None:
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


def test_other_extractors_read_the_archive_without_the_network(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    stats = shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"]) != before
    assert stats.extra["fetched"] == 0 and stats.extra["extracted_again"] == 17  # 16 pages and one without text
    assert shard.warc.read_bytes() == warc
    shard.run(DOWN, archive=True)
    assert shard.bytes() == before


def test_without_an_archive_other_extractors_stop_the_run_with_what_would_be_fetched_again(
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
        str(shard.settings),
    ):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not server.requested and shard.bytes() == before and not shard.journal.exists()
    shard.run(DOWN)  # key restored
    assert shard.bytes() == before
    stats = shard.run(server.address, extractors=["newspaper3k"], refetch=True)
    assert stats.extra["fetched"] == 17
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])
    shard.run(DOWN, extractors=["newspaper3k"])  # refetching stays agreed
    shard.settings.unlink()  # which agrees to refetch
    shard.run(server.address)
    assert shard.bytes() == before
    assert "17 URLs are fetched again" in capsys.readouterr().err


def test_refetch_stays_agreed_until_all_pages_are_fetched_despite_interruptions(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    with pytest.raises(OutageError):
        shard.run(DOWN, extractors=["newspaper3k"], refetch=True)
    shard.run(server.address, extractors=["newspaper3k"])
    assert shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])


def test_a_page_limit_can_be_lowered_and_restored_and_larger_pages_are_fetched_only_when_agreed(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    whole = shard.bytes()
    small = shard.run(DOWN, max_bytes=BIG)
    assert small.reasons["too_large"] == 1 and small.extra["fetched"] == 0
    assert shard.bytes() == fresh(tmp_path, server, max_bytes=BIG)
    shard.run(DOWN)
    assert shard.bytes() == whole  # fetched once, not again

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
    with pytest.raises(OutageError):  # robots.txt cannot be fetched
        shard.run(DOWN, archive=True)
    assert shard.bytes() == ignored
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert all(name.endswith("/robots.txt") for name in server.requested) and stats.extra["fetched"] == 0
    assert shard.bytes() == fresh(tmp_path, server) and stats.reasons["robots"] == 2
    shard.run(DOWN, archive=True)
    shard.finished_journal.unlink()
    shard.run(server.address, archive=True)  # the archive has robots.txt's policy, too
    assert shard.bytes() == fresh(tmp_path, server)
    stats = shard.run(server.address, obey_robots=False, archive=True)  # the archive has their pages
    assert shard.bytes() == ignored and stats.extra["fetched"] == 0


def test_changed_url_rules_invalidate_no_outcome(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before = shard.bytes()
    for rules in ({"extra_domains": ["site1.example"]}, {"extra_domains": ["middle.example"]}, {"min_length": 22}):
        shard.run(DOWN, blacklist=rules)
        assert shard.bytes() == fresh(tmp_path, server, blacklist=rules) != before, rules
    shard.run(DOWN)
    assert shard.bytes() == before
