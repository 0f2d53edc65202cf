"""Which outcomes of earlier runs are used again: changed lists and keys, archives."""

import gzip
from pathlib import Path

import pytest

from common.errors import ConfigError, OutageError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.journal import Journal
from corpus.scrape.outcome_cache import OutcomeCache, outcome_settings
from corpus.urls.rules import UrlRules
from tests.corpus.scrape.shards import BIG, DOWN, URLS, Shard, fresh
from tests.helpers import called, read_shard
from tests.rude_server import Server, reply, rude_server

pytestmark = pytest.mark.usefixtures("quick_extraction")
OTHER = ["newspaper3k"]


def test_with_another_list_only_new_urls_are_fetched_and_the_bytes_are_those_of_a_fresh_scrape(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    lists = [
        URLS[:15],
        URLS[::-1],
        [url for url in URLS if "site2" not in url] + ["http://site2.example/1000"],
        ["http://new.example/", *URLS, *URLS[:3]],
        [url.replace("http://site0", "http://SITE0") + "#part" for url in URLS],
    ]
    asked: set[str] = set()
    for urls in lists:
        server.requested.clear()
        shard.write_list(urls)
        assert called("corpus.scrape", *shard.arguments(server.address)).returncode == 0
        pages = {name for name in server.requested if not name.endswith("robots.txt")}
        now = {name for name in pages if name.split("/")[0] not in ("middle.example", "moved.example")}
        assert not now & asked - {"site1.example/1"}, "the one that redirects lead to"
        asked |= now
        assert shard.bytes() == fresh(tmp_path, server, urls=urls)
    shard.run(DOWN, URLS[:2], contact="me@example.org", page_timeout=1, host_delay=5)
    assert [record["url"] for record in read_shard(shard.output)] == URLS[:2]
    assert shard.run(DOWN, URLS).extra["fetched"] == 0, "a URL that left the list is still known"
    for rules in ({"extra_domains": ["site1.example"]}, {"extra_domains": ["middle.example"]}, {"min_length": 22}):
        shard.run(DOWN, blacklist=rules)
        assert shard.bytes() == fresh(tmp_path, server, blacklist=rules) != fresh(tmp_path, server, urls=URLS), rules


def test_outcomes_count_while_the_recorded_site_is_unchanged_in_whatever_order_it_is_listed(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, site, rglob = Shard(tmp_path), tmp_path / "site", Path.rglob
    site.mkdir()
    shard.write_list(URLS)
    for order in (1, -1):
        for name in "ab":
            (site / name).write_text(name)
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern, to=order: sorted(rglob(folder, pattern))[::to])
        server.requested.clear()
        assert called("corpus.scrape", *shard.arguments(server.address), "--site", site).returncode == 0
        assert bool(server.requested) is (order == 1)
    (site / "b").rename(site / "c")
    assert called("corpus.scrape", *shard.arguments(DOWN), "--site", site).returncode == 75
    (site / "c").rename(site / "b").write_text("c")
    assert called("corpus.scrape", *shard.arguments(DOWN), "--site", site).returncode == 75


@pytest.mark.parametrize(
    ("reason", "key"),
    [("too_large", "max_bytes"), ("too_many_redirects", "max_redirects"), ("extract_timeout", "extract_timeout")],
)
def test_what_a_limit_refused_is_tried_again_once_that_limit_is_larger(tmp_path: Path, reason: str, key: str) -> None:
    url, rules = "http://one.example/", UrlRules(BlacklistSettings())
    for limit, stale in ((2, None), (3, key), (2, None), (1, None)):
        settings = ScrapeSettings.model_validate({key: limit})
        with Journal(tmp_path / "pages", outcome_settings(settings)) as journal:
            if url not in journal.known:
                journal.append(url, reason=reason)
            assert OutcomeCache(journal, [url], settings, rules).stale_key(0) == stale, limit


def test_without_an_archive_other_extractors_need_consent_which_lasts_until_all_pages_are_fetched(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before = shard.bytes()
    server.requested.clear()
    with pytest.raises(ConfigError) as refusal:
        shard.run(server.address, extractors=OTHER)
    for part in ("scrape.extractors", "17 URLs", "--refetch", str(shard.settings)):
        assert part in str(refusal.value)
    assert not server.requested and shard.bytes() == before
    shard.run(DOWN)  # key restored
    assert shard.bytes() == before
    with pytest.raises(OutageError):
        shard.run(DOWN, extractors=OTHER, refetch=True)
    assert shard.run(server.address, extractors=OTHER).extra["fetched"] == 17
    assert shard.bytes() == fresh(tmp_path, server, extractors=OTHER)
    for limit, dropped in ((2 * BIG - 1, 1), (2 * BIG, 0)):
        assert shard.run(DOWN, extractors=OTHER, max_bytes=limit).reasons["too_large"] == dropped
    shard.settings.unlink()  # which is consent, too
    shard.run(server.address)
    assert shard.bytes() == before


def test_a_smaller_limit_also_counts_the_bytes_sent(tmp_path: Path) -> None:
    shard, packed = Shard(tmp_path), gzip.compress(b"abc")
    pages = {
        "packed.example/": reply(packed, Content_Encoding="gzip", Content_Type="text/plain"),
        "plain.example/": reply(b"abcd", Content_Type="text/plain"),
    }
    urls = [f"http://{name}" for name in pages]
    with rude_server(pages) as server:
        assert shard.run(server.address, urls).documents_out == 2
        assert shard.run(server.address, urls, max_bytes=len(packed) - 1).reasons == {"too_large": 1}


def test_the_archive_gives_the_pages_for_other_extractors_and_alone_restores_a_crawl(
    tmp_path: Path, server: Server
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    stats = shard.run(DOWN, archive=True, extractors=OTHER)
    assert shard.bytes() == fresh(tmp_path, server, extractors=OTHER) != before
    assert (stats.extra["fetched"], stats.extra["extracted_again"]) == (0, 17)  # 16 pages and one without text
    damaged = bytearray(warc)
    damaged[len(warc) // 2] ^= 0xFF
    shard.warc.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"\(1 URLs\).*--archive"):
        shard.run(DOWN, archive=True)
    shard = Shard(tmp_path, "again")
    shard.warc.write_bytes(warc)
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert shard.bytes() == before and shard.warc.read_bytes() == warc and stats.extra["extracted_again"] == 19
    assert not {"site0.example/0", "plain.example/", "big.example/", "moved.example/"} & set(server.requested)
