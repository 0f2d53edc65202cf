import asyncio
import gzip
import itertools
import socket
import time
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from common.settings import BlacklistSettings, ScrapeSettings
from corpus.fetch import Fetcher, Page
from corpus.network import PageError
from corpus.urls import UrlRules
from tests import rude_server as rude
from tests.rude_server import Server, redirect, reply, rude_server

HTML = b"<html><body><p>Hello</p></body></html>"


def settings_for(server: Server, **changes: Any) -> ScrapeSettings:
    quick = {"host_delay": 0, "retries": 2, "retry_delay": 0.02, "page_timeout": 0.6, "read_timeout": 0.4}
    return ScrapeSettings(**{"resolve": {"*": server.address}, **quick, **changes})


def fetch(settings: ScrapeSettings, *urls: str, allow_private: bool = False) -> list[Page | str]:
    """What became of each URL, all fetched at once: the page, or the name of the failure."""

    async def one(fetcher: Fetcher, url: str) -> Page | str:
        try:
            page = await fetcher.fetch(url)
        except PageError as error:
            return error.reason
        fetcher.slots.release()
        return page

    async def every() -> list[Page | str]:
        async with Fetcher(settings, UrlRules(BlacklistSettings()), allow_private) as fetcher:
            return await asyncio.gather(*(one(fetcher, url) for url in urls))

    return asyncio.run(every())


def test_every_rude_answer_ends_in_its_named_reason_within_its_deadline() -> None:
    expected = {
        "silence": (rude.silence, "timeout"),
        "drip": (rude.drip, "timeout"),
        "endless": (rude.endless, "too_large"),
        "bomb": (rude.gzip_bomb(50_000_000), "too_large"),
        "announced": (reply(b"", Content_Length="99999999"), "too_large"),
        "reset": (rude.reset, "connection"),
        "truncated": (rude.truncated, "connection"),
        "gibberish": (rude.gibberish, "bad_response"),
        "pdf": (reply(b"%PDF-1.4", Content_Type="application/pdf"), "content_type"),
        "pdf-as-html": (reply(b"%PDF-1.4 as HTML"), "content_type"),
        "damaged": (reply(b"\x1f\x8bnot gzip", Content_Encoding="gzip"), "bad_encoding"),
        "cut-gzip": (reply(gzip.compress(HTML)[:-4], Content_Encoding="gzip"), "bad_encoding"),
        "unasked": (reply(HTML, Content_Encoding="br"), "bad_encoding"),
        "gone": (reply(status="410 Gone"), "http_410"),
        "loop": (redirect("/"), "redirect_loop"),
        "to-video": (redirect("https://www.youtube.com/watch?v=1"), "redirect_refused"),
        "to-picture": (redirect("/cat.jpg"), "redirect_refused"),
        "to-loopback": (redirect("http://127.0.0.1/"), "redirect_refused"),
        "to-nonsense": (redirect("http://[::1"), "redirect_refused"),
        "to-files": (redirect("file:///etc/passwd"), "redirect_refused"),
    }
    pages = {f"{name}.example/": behaviour for name, (behaviour, _) in expected.items()}
    chain = {f"chain.example/{n}": redirect(f"/{n + 1}") for n in range(7)}
    good = {f"good.example/{n}": reply(HTML) for n in range(20)}
    urls = [*(f"https://{name}.example/" for name in expected), "https://chain.example/0"]
    with rude_server({**pages, **chain, **good}) as server:
        started = time.monotonic()
        settings = settings_for(server, obey_robots=False, max_bytes=100_000, retries=0)
        outcomes = fetch(settings, *urls, *(f"http://good.example/{n}" for n in range(20)))
        assert time.monotonic() - started < 30
    assert dict(zip(urls, outcomes, strict=False)) == {
        **{f"https://{name}.example/": reason for name, (_, reason) in expected.items()},
        "https://chain.example/0": "too_many_redirects",
    }
    assert [page.body for page in outcomes[len(urls) :] if isinstance(page, Page)] == [HTML] * 20


def test_a_page_keeps_its_logical_url_and_the_bytes_as_sent() -> None:
    packed = gzip.compress(HTML)
    behaviours = {
        "a.example/old": redirect("//b.example/new?x=1#part"),
        "b.example/new?x=1": reply(packed, Content_Encoding="gzip", Content_Type="text/html; charset=utf-8"),
        "c.example/": reply(zlib.compress(HTML), Content_Encoding="deflate"),
        "d.example/": reply(zlib.compress(HTML)[2:-4], Content_Encoding="deflate"),  # without zlib's header
    }
    with rude_server(behaviours) as server:
        urls = ["https://a.example/old#top", "http://c.example", "http://d.example/"]
        page, deflated, headless = fetch(settings_for(server), *urls)
    assert isinstance(page, Page) and isinstance(deflated, Page) and isinstance(headless, Page)
    assert (page.url, page.raw, page.body) == ("https://b.example/new?x=1", packed, HTML)
    assert page.content_type == "text/html; charset=utf-8" and ("Content-Encoding", "gzip") in page.headers
    assert deflated.body == headless.body == HTML


def test_names_with_only_private_addresses_are_never_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with rude_server({"front.example/": redirect("http://inside.example/"), "inside.example/": reply(HTML)}) as server:
        ip, port = server.address.split(":")
        answers = {"inside.example": ip, "mapped.example": f"::ffff:{ip}"}

        def lookup(host: str, service: int, *_: object, **__: object) -> list[tuple[Any, ...]]:
            family = socket.AF_INET6 if ":" in answers[host] else socket.AF_INET
            return [(family, socket.SOCK_STREAM, 6, "", (answers[host], int(port)))]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        settings = settings_for(
            server, resolve={"front.example": server.address}, contact="me@mail.example", obey_robots=False
        )
        urls = ["http://front.example/", "http://inside.example/", "http://mapped.example/", "http://[::1]/page"]
        assert fetch(settings, *urls) == ["redirect_refused", "private_host", "private_host", "private_host"]
        assert server.connections == 1  # the front page; nothing behind it
        # the same lookup does lead to the server: only the rule stands between
        (page,) = fetch(settings, "http://inside.example/", allow_private=True)
        assert isinstance(page, Page) and server.connections == 2


def test_robots_txt_leads_to_no_private_address_either() -> None:
    behaviours = {"sly.example/page": reply(HTML)}
    with rude_server(behaviours) as server:
        behaviours["sly.example/robots.txt"] = redirect(f"http://{server.address}/robots.txt")
        settings = settings_for(server, resolve={"sly.example": server.address}, contact="me@mail.example")
        (page,) = fetch(settings, "http://sly.example/page")
        assert isinstance(page, Page)
        assert server.requested == ["sly.example/robots.txt", "sly.example/page"]


def test_names_without_address_and_broken_tls_have_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with rude_server({}) as server:
        ip, port = server.address.split(":")

        def lookup(host: str, service: int, *_: object, **__: object) -> list[tuple[Any, ...]]:
            if host == "nowhere.example":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, int(port)))]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        settings = settings_for(server, resolve={}, contact="me@mail.example")
        urls = ["https://nowhere.example/", "https://plain.example/"]
        assert fetch(settings, *urls, allow_private=True) == ["dns", "tls"]


def test_a_redirect_to_a_public_host_needs_a_contact() -> None:
    with rude_server({"front.example/": redirect("http://elsewhere.example/")}) as server:
        settings = settings_for(server, resolve={"front.example": server.address})
        assert fetch(settings, "http://front.example/") == ["redirect_refused"]


def test_failures_that_may_pass_are_tried_again() -> None:
    broken = reply(status="503 Service Unavailable")
    behaviours = {
        "mends.example/": rude.in_turn(broken, rude.reset, reply(HTML)),
        "stays.example/": broken,
        "gone.example/": reply(status="404 Not Found"),
    }
    with rude_server(behaviours) as server:
        settings = settings_for(server, obey_robots=False)
        mended, stays, gone = fetch(settings, *(f"http://{name}" for name in behaviours))
        asked = {route: server.requested.count(route) for route in behaviours}
    assert isinstance(mended, Page) and (stays, gone) == ("http_503", "http_404")
    assert asked == {"mends.example/": 3, "stays.example/": 3, "gone.example/": 1}


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(form: str) -> None:
    # the date form has whole seconds: two ahead leave at least one
    wait = "1" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    busy = reply(status="429 Too Many Requests", Retry_After=wait)
    with rude_server({"busy.example/": rude.in_turn(busy, reply(HTML))}) as server:
        started = time.monotonic()
        (page,) = fetch(settings_for(server, obey_robots=False), "http://busy.example/")
        assert isinstance(page, Page) and 0.9 < time.monotonic() - started < 30


def test_nobody_waits_an_hour_for_one_page() -> None:
    busy = reply(status="429 Too Many Requests", Retry_After="3600")
    with rude_server({"busy.example/": busy}) as server:
        assert fetch(settings_for(server, obey_robots=False), "http://busy.example/") == ["http_429"]
        assert server.requested == ["busy.example/"]


def test_robots_txt_is_obeyed_and_fetched_once_a_host() -> None:
    rules = b"User-agent: *\nDisallow: /\n\nUser-agent: urls-to-gpt2\nDisallow: /private/\n"
    behaviours = {
        "open.example/robots.txt": reply(rules, Content_Type="text/plain"),
        "moved.example/robots.txt": redirect("https://open.example/robots.txt"),
        "broken.example/robots.txt": reply(status="500 Oops"),
        "hanging.example/robots.txt": rude.silence,
    }
    names = ["open.example/page", "open.example/private/page", "moved.example/private/", "none.example/page"]
    pages = {name: reply(HTML) for name in [*names, "broken.example/", "hanging.example/"]}
    with rude_server({**behaviours, **pages}) as server:
        urls = [f"https://{name}" for name in pages]
        outcomes = fetch(settings_for(server, retries=1), *urls, *urls)
        asked = server.requested
    results = ["page" if isinstance(outcome, Page) else outcome for outcome in outcomes]
    assert results == ["page", "robots", "robots", "page", "robots_unreachable", "robots_unreachable"] * 2
    assert asked.count("none.example/robots.txt") == asked.count("moved.example/robots.txt") == 1
    assert asked.count("broken.example/robots.txt") == 2 and "broken.example/" not in asked
    assert "open.example/private/page" not in asked


def test_a_host_is_asked_one_page_at_a_time_with_its_delay_between() -> None:
    under_way = busiest = 0
    times: list[float] = []

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, busiest
        times.append(time.monotonic())
        under_way += 1
        busiest = max(busiest, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await reply(HTML)(writer)

    urls = [f"http://one.example/{n}" for n in range(4)]
    with rude_server({f"one.example/{n}": slow for n in range(4)}) as server:
        outcomes = fetch(settings_for(server, obey_robots=False, host_delay=0.15), *urls)
    assert all(isinstance(page, Page) for page in outcomes)
    assert busiest == 1
    assert all(later - earlier > 0.13 for earlier, later in itertools.pairwise(times))


def test_a_crawl_delay_is_honoured_unless_it_is_absurd() -> None:
    def robots(delay: str) -> rude.Behaviour:
        return reply(f"User-agent: *\nCrawl-delay: {delay}\n".encode(), Content_Type="text/plain")

    pages = {"slow.example/1": reply(HTML), "slow.example/2": reply(HTML), "never.example/": reply(HTML)}
    rules = {"slow.example/robots.txt": robots("0.4"), "never.example/robots.txt": robots("86400")}
    with rude_server({**pages, **rules}) as server:
        started = time.monotonic()
        first, second, never = fetch(settings_for(server), *(f"http://{name}" for name in pages))
        assert 0.35 < time.monotonic() - started < 30
    assert isinstance(first, Page) and isinstance(second, Page) and never == "crawl_delay"
