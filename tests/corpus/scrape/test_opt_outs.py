"""Opt-outs: every form of robots directives and TDM reservations; which files are requested."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, PageError
from common.settings import ScrapeSettings
from corpus.extract.extractors import load_extractors
from corpus.extract.pool import extract_allowed
from corpus.scrape.__main__ import main
from corpus.scrape.opt_outs import parse_tdmrep
from corpus.scrape.response import FetchedPage
from tests.corpus.scrape.fetching import Visits
from tests.corpus.scrape.shards import BUSY, DOWN, Shard, article
from tests.helpers import called, read_rejects, read_shard
from tests.rude_server import Behaviour, redirect, reply, rude_server

TEXT = (
    "<p>" + "A page with a sentence that an extractor takes for an article, which is all that it needs. " * 3 + "</p>"
)
NOINDEX: dict[str, Any] = {"opt_out_directives": ["noindex"]}
XHTML = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head>{}</head><body>{}</body></html>'


def outcome(headers: list[tuple[str, str]], head: str, **changes: Any) -> str:
    """The reason by which a page is dropped, or `ok`."""
    settings = ScrapeSettings(**{"opt_outs": "obey", "extractors": ["newspaper3k"], **changes})
    body = (head if head.startswith("<?xml") else f"<html><head>{head}</head><body>{TEXT}</body></html>").encode()
    page = FetchedPage("http://one.example/", 200, "OK", tuple(headers), "text/html; charset=utf-8", body, body)
    try:
        return extract_allowed(page, settings, EXTRACTORS).text and "ok"
    except PageError as error:
        return error.reason


EXTRACTORS = load_extractors(["newspaper3k"])
DROPPED, KEPT = "x_robots_tag", "ok"
MINE: dict[str, Any] = {"robot_name": "MyBot", "user_agent": "Mozilla/5.0 (compatible; MyBot/1.0)"}
TAGS: list[tuple[str, dict[str, Any], str, list[str]]] = [  # a name, settings, outcome, values of X-Robots-Tag
    ("lists", {}, DROPPED, ["noai", "noimageai", "NoAI", "  noai  ", "nofollow, noai", "nofollow,noai,noarchive",
        "all, noai", "nofollow; noai", "nofollow noai", '"noai, noimageai"', "max-snippet: 20, noai",
        "noai, otherbot: all"]),
    ("others", {}, KEPT, ["", "all", "noaix", "max-snippet: 20, nofollow", "noindex", "none"]),
    ("noindex", NOINDEX, DROPPED, ["noindex", "none", "nofollow, NOINDEX"]),
    ("only noindex", NOINDEX, KEPT, ["noai", "all"]),
    ("no directive", {"opt_out_directives": []}, KEPT, ["noai, noindex"]),
    ("another robot", {}, KEPT, ["otherbot: noai", "otherbot: nofollow, noai", "otherbot/2.1: noai",
        "urls-to-gpt2: nofollow, otherbot: noai", "otherbot: unavailable_after: 25-Jun-2010 15:00:00 GMT, noai"]),
    ("this robot", {}, DROPPED, ["urls-to-gpt2: noai", "URLs-to-GPT2/0.1: nofollow, noai", "*: noai",
        "otherbot: nofollow, urls-to-gpt2: noai"]),
    ("its other name", MINE, DROPPED, ["MyBot: noai"]),
    ("dates", {}, KEPT, ["unavailable_after: 25 Jun 2010 15:00:00 PST",
        "unavailable_after: Friday, 25-Jun-10 15:00:00 GMT"]),
    ("after dates", {}, DROPPED, ["unavailable_after: Friday, 25-Jun-10 15:00:00 GMT, noai",
        "unavailable_after: 25 Jun 2010, 15:00:00 PST, noai"]),
]  # fmt: skip
META = "meta_robots"
METAS: list[tuple[str, dict[str, Any], str]] = [  # the head of a page, settings, outcome
    ('<meta name="robots" content="noai">', {}, META),
    ("<META CONTENT='NOAI' NAME='Robots'>", {}, META),
    ('<meta name=" robots " content="nofollow , noimageai">', {}, META),
    ('<meta name="robots" content="&#110;o&#97;i">', {}, META),
    (XHTML.format('<meta name="robots" content="noai" />', TEXT), {}, META),
    ('<p <b>broken<meta name="robots" content="noai"', {}, META),
    ('<noscript><meta name="robots" content="noai"></noscript>', {}, META),
    ('<meta name="urls-to-gpt2" content="noai">', {}, META),
    ('<meta name="robots" content="all"><meta name="URLS-TO-GPT2" content="noai">', {}, META),
    ('<meta name="robots" content="noai"><meta name="urls-to-gpt2" content="all">', {}, META),
    ('<meta name="googlebot" content="noai">', {}, KEPT),
    ('<meta http-equiv="X-Robots-Tag" content="nofollow, noai">', {}, META),
    ('<meta http-equiv="X-Robots-Tag" content="otherbot: noai">', {}, KEPT),
    ('<!-- <meta name="robots" content="noai"> -->', {}, KEPT),
    ('<script>\'<meta name="robots" content="noai">\'</script>', {}, KEPT),
    ('<meta name="robots" content="noindex">', {}, KEPT),
    ('<meta name="robots" content="NONE">', NOINDEX, META),
    ('<meta name="robots">', {}, KEPT),
    ('<meta property="robots" content="noai">', {}, KEPT),
    ('<meta name="robots" content="noai">', {"opt_outs": "ignore"}, KEPT),
]
TDM: list[tuple[str, str, str]] = [  # the value of tdm-reservation ("" for no header), the head of a page, outcome
    ("1", "", "tdm_header"),
    ("0, 1", "", "tdm_header"),
    ("0", "", KEPT),
    ("true", "", KEPT),
    ("", '<META NAME="TDM-Reservation" CONTENT=" 1 ">', "tdm_meta"),
    ("", '<meta name="tdm-reservation" content="0"><meta name="tdm-reservation" content="1">', "tdm_meta"),
    ("1", '<meta name="tdm-reservation" content="0">', KEPT),
    ("0", '<meta name="tdm-reservation" content="1">', "tdm_meta"),
    ("1", '<meta name="tdm-reservation" content="maybe">', "tdm_header"),
    ("1", '<meta name="robots" content="noai">', META),
]


def test_every_form_of_an_opt_out_drops_its_page_and_meta_supersedes_the_header_of_tdm() -> None:
    for name, settings, expected, values in TAGS:
        for value in values:
            headers = [("Server", "noai"), ("x-robots-TAG", "nofollow"), ("X-Robots-Tag", value)]
            assert outcome(headers, "", **settings) == expected, (name, value)
    for head, settings, expected in METAS:
        assert outcome([], head, **settings) == expected, head
    for value, head, expected in TDM:
        assert outcome([("TDM-Reservation", value)] if value else [], head) == expected, (value, head)


def test_the_first_location_of_tdmrep_that_matches_counts_and_anything_but_a_list_reserves_nothing() -> None:
    rules = parse_tdmrep(
        b'\xef\xbb\xbf[{"location": "/free/", "tdm-reservation": 0}, {"location": "/*.pdf$", "tdm-reservation": "1"},'
        b'"x",'
        b'{"location": "/odd", "tdm-reservation": 7}, {"location": "/caf%c3%a9", "tdm-reservation": 1}, {},'
        b'{"location": "/books/", "tdm-reservation": 1, "tdm-policy": "https://one.example/policy.json"}]'
    )
    reserved = ["/a.pdf", "/books/1?x=1", "/caf%C3%A9s", "/b%6Foks/"]
    free = ["/free/a.pdf", "/a.pdf?page=1", "/Books/", "/odd", "/", "/book"]
    assert [path for path in reserved + free if not rules.allows(path)] == reserved
    for body in (
        b"",
        b"<html>404</html>",
        b'{"location": "/", "tdm-reservation": 1}',
        b"[1",
        b"[" + b" " * 600_000 + b"]",
    ):
        assert parse_tdmrep(body).allows("/")


def tdmrep(text: str) -> Behaviour:
    return reply(text.encode(), Content_Type="application/json")


ALL = tdmrep('[{"location": "/", "tdm-reservation": 1}]')
FILE = "/.well-known/tdmrep.json"
WEB: dict[str, Behaviour] = {
    **{f"some.example/{n}": reply(article(n)) for n in range(3)},
    f"some.example{FILE}": tdmrep('[{"location": "/1$", "tdm-reservation": 1}]'),
    "free.example/": reply(article(3), tdm_reservation="0"),
    f"free.example{FILE}": ALL,
    "shy.example/": reply(article(4)),
    f"shy.example{FILE}": ALL,
    "shy.example/robots.txt": reply(b"User-agent: *\nDisallow: /.well-known/", Content_Type="text/plain"),
    "moved.example/": redirect("http://all.example/"),
    f"moved.example{FILE}": ALL,
    "all.example/": reply(article(5)),
    f"all.example{FILE}": redirect("http://far.example/rules"),
    "far.example/rules": ALL,
    "ill.example/": reply(article(6)),
    f"ill.example{FILE}": BUSY,
    "plain.example/": reply(b"words " * 99, Content_Type="text/plain", tdm_reservation="1"),
    "tag.example/": reply(article(7), X_Robots_Tag="noai"),
    "meta.example/": reply(article(8).replace(b"<head>", b'<head><meta name="robots" content="noai">')),
}
LIST = [f"http://{name}" for name in WEB if not name.endswith((".json", "robots.txt", "rules"))]
OBEYED = {
    "http://some.example/1": "tdmrep",
    "http://moved.example/": "tdmrep",
    "http://all.example/": "tdmrep",
    "http://ill.example/": "tdmrep_unreachable",
    "http://plain.example/": "tdm_header",
    "http://tag.example/": "x_robots_tag",
    "http://meta.example/": "meta_robots",
}


def test_tdmrep_is_asked_for_politely_and_not_where_addresses_are_not_public(visits: Visits) -> None:
    pages = {name: visits.noted(WEB["some.example/0"]) for name in ("one.example/", "one.example/2")}
    with rude_server({**pages, f"one.example{FILE}": visits.noted(redirect("http://10.0.0.1/"))}) as server:
        known = {"resolve": {"one.example": server.address}, "contact": "me@site.example", "opt_outs": "obey"}
        assert visits.fetch(server, *(f"http://{name}" for name in pages), host_delay=2, **known) == ["page"] * 2
        assert visits.times == [0, 2, 4] and sorted(server.requested) == sorted([*pages, f"one.example{FILE}"])


def dropped(shard: Shard) -> dict[str, str]:
    return {reject["url"]: reject["reason"] for reject in read_rejects(shard.rejects)}


@pytest.mark.usefixtures("quick_extraction")
def test_a_host_with_pages_is_asked_for_tdmrep_once_and_a_known_outcome_needs_no_request(tmp_path: Path) -> None:
    with rude_server(WEB) as server:
        shard = Shard(tmp_path)
        assert shard.run(server.address, LIST).documents_out == len(LIST)
        assert not any(name.endswith(FILE) for name in server.requested), "today's behaviour"
        server.requested.clear()
        shard = Shard(tmp_path, "obeying")
        for attempt in range(2):
            stats = shard.run(
                server.address if attempt == 0 else DOWN, LIST, opt_outs="obey", archive=True, concurrency=1
            )
            assert dropped(shard) == OBEYED and sum(stats.reasons.values()) == len(OBEYED)
        asked = [name for name in server.requested if name.endswith(FILE)]
        # no request: headers decide (free, tag, plain), robots.txt (shy), no page (moved)
        assert sorted(asked) == [f"{host}.example{FILE}" for host in ("all", "ill", "meta", "some")]
        pages = shard.output.with_name("from_warc.jsonl.zst")
        options = ["--warc", shard.warc, "--output", pages, "scrape.opt_outs=obey"]
        assert called(main, *options).returncode == 0, "pages that opted out are not in the archive"
        assert {document["url"] for document in read_shard(pages)} == set(LIST) - set(OBEYED)


@pytest.mark.usefixtures("quick_extraction")
def test_switching_to_obey_judges_the_pages_of_the_archive_and_needs_consent_without_one(tmp_path: Path) -> None:
    urls = [url for url in LIST if "moved" not in url]
    with rude_server(WEB) as server:
        fresh = Shard(tmp_path, "fresh")
        fresh.run(server.address, urls, opt_outs="obey")
        shard = Shard(tmp_path)
        shard.run(server.address, urls, archive=True)
        before, settings = shard.bytes(), shard.settings.read_bytes()
        server.requested.clear()
        with pytest.raises(ConfigError, match=r"scrape.opt_outs was ignore and is \[noai, noimageai\] \(\d+ URLs\)"):
            shard.run(server.address, urls, opt_outs="obey")
        assert not server.requested
        shard.run(server.address, urls, opt_outs="obey", archive=True)
        assert shard.bytes() == fresh.bytes() != before
        assert {name for name in server.requested if not name.endswith(("robots.txt", FILE))} == {"far.example/rules"}
        stats = shard.run(server.address, urls, opt_outs="obey", archive=True, opt_out_directives=["noimageai"])
        assert stats.documents_out == len(urls) - len(OBEYED) + 1 + 2, "two robots directives count no more"
        shard.run(DOWN, urls, archive=True)
        assert shard.bytes() == before and shard.settings.read_bytes() == settings
        assert b"opt_outs" not in settings
