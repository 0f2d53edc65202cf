import asyncio
import contextlib
import gzip
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import brotli
import pytest

from common.errors import PageError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.scrape.fetch import Fetcher
from corpus.scrape.response import FetchedPage
from corpus.urls.rules import UrlRules
from tests import rude_server as rude
from tests.rude_server import Server, redirect, reply, rude_server

HTML = b"<html><body><p>Hello</p></body></html>"


def settings_for(server: Server, **changes: Any) -> ScrapeSettings:
    quick = {"host_delay": 0, "retries": 2, "retry_delay": 0.02, "page_timeout": 0.6, "read_timeout": 0.4}
    return ScrapeSettings(**{"resolve": {"*": server.address}, **quick, **changes})


def fetch(settings: ScrapeSettings, *urls: str, allow_private: bool = False) -> list[FetchedPage | str]:
    """What became of each URL, all fetched at once: the page, or the name of the failure."""

    async def one(fetcher: Fetcher, url: str) -> FetchedPage | str:
        try:
            page = await fetcher.fetch(url)
        except PageError as error:
            return error.reason
        fetcher.slots.release()
        return page

    async def every() -> list[FetchedPage | str]:
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
        "cut-chunk": (rude.cut_chunk, "connection"),
        "cut-between-chunks": (rude.cut_between_chunks, "connection"),
        "gibberish": (rude.gibberish, "bad_response"),
        "negative": (reply(HTML, Content_Length="-5"), "bad_response"),
        "absurd": (reply(HTML, Content_Length="9" * 30), "bad_response"),
        "cookies": (reply(HTML, Set_Cookie="a=b\r\nSet-Cookie: c=d" * 5000), "bad_response"),
        "upgrade": (reply(status="101 Switching Protocols", Upgrade="websocket"), "http_101"),
        "pdf": (reply(b"%PDF-1.4", Content_Type="application/pdf"), "content_type"),
        "pdf-as-html": (reply(b"%PDF-1.4 as HTML"), "content_type"),
        "damaged": (reply(b"\x1f\x8bnot gzip", Content_Encoding="gzip"), "bad_encoding"),
        "cut-gzip": (reply(gzip.compress(HTML, mtime=0)[:-4], Content_Encoding="gzip"), "bad_encoding"),
        "unasked": (reply(HTML, Content_Encoding="br"), "bad_encoding"),
        "gone": (reply(status="410 Gone"), "http_410"),
        "loop": (redirect("/"), "redirect_loop"),
        "to-video": (redirect("https://www.youtube.com/watch?v=1"), "redirect_refused"),
        "to-picture": (redirect("/cat.jpg"), "redirect_refused"),
        "to-loopback": (redirect("http://127.0.0.1/"), "redirect_refused"),
        "to-nonsense": (redirect("http://[::1"), "redirect_refused"),
        "to-files": (redirect("file:///etc/passwd"), "redirect_refused"),
        "to-noise": (rude.raw(b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe.example/\r\n\r\n"), "redirect_refused"),
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
    assert [page.body for page in outcomes[len(urls) :] if isinstance(page, FetchedPage)] == [HTML] * 20


def test_a_page_keeps_its_logical_url_and_the_bytes_as_sent() -> None:
    packed = gzip.compress(HTML, mtime=0)
    behaviours = {
        "a.example/old": redirect("//b.example/new?x=1#part"),
        "b.example/new?x=1": reply(packed, Content_Encoding="gzip", Content_Type="text/html; charset=utf-8"),
        "c.example/": reply(zlib.compress(HTML), Content_Encoding="deflate"),
        "d.example/": reply(zlib.compress(HTML)[2:-4], Content_Encoding="deflate"),  # without zlib's header
    }
    with rude_server(behaviours) as server:
        urls = ["https://a.example/old#top", "http://c.example", "http://d.example/"]
        page, deflated, headless = fetch(settings_for(server), *urls)
    assert isinstance(page, FetchedPage) and isinstance(deflated, FetchedPage) and isinstance(headless, FetchedPage)
    assert (page.url, page.raw, page.body) == ("https://b.example/new?x=1", packed, HTML)
    assert page.content_type == "text/html; charset=utf-8" and ("Content-Encoding", "gzip") in page.headers
    assert deflated.body == headless.body == HTML


def test_a_body_is_read_in_every_coding_also_robots_txt() -> None:
    rules = b"User-agent: *\nDisallow: /private\n"
    behaviours = {
        "br.example/robots.txt": reply(brotli.compress(rules), Content_Encoding="br", Content_Type="text/plain"),
        "br.example/": reply(brotli.compress(HTML), Content_Encoding="br"),
        "two.example/robots.txt": reply(gzip.compress(rules[:14]) + gzip.compress(rules[14:]), Content_Encoding="gzip"),
        "two.example/": reply(gzip.compress(HTML[:20]) + gzip.compress(HTML[20:]), Content_Encoding="gzip"),
    }
    behaviours |= {f"{host}.example/private": reply(HTML) for host in ("br", "two")}
    with rude_server(behaviours) as server:
        for host in ("br", "two"):
            urls = [f"http://{host}.example/", f"http://{host}.example/private"]
            page, private = fetch(settings_for(server), *urls)
            assert isinstance(page, FetchedPage) and page.body == HTML and private == "robots"


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
        assert isinstance(page, FetchedPage) and server.connections == 2


@pytest.mark.parametrize(
    "address",
    "fec0::1 ::127.0.0.1 64:ff9b:1::7f00:1 64:ff9b::7f00:1 2002:7f00:1:: 2606:4700::5efe:7f00:1 100::1".split(),
)
def test_an_address_that_is_not_public_is_refused_before_any_packet(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))]

    async def connect(*_: object, **__: object) -> None:
        pytest.fail(f"a connection to {address}")

    with rude_server({"front.example/": redirect(f"http://[{address}]/page")}) as server:
        settings = settings_for(
            server, resolve={"front.example": server.address}, contact="me@mail.example", obey_robots=False, retries=0
        )
        assert fetch(settings, "http://front.example/") == ["redirect_refused"]
        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        monkeypatch.setattr("aiohttp.TCPConnector._wrap_create_connection", connect)
        urls = ["http://name.example/", f"http://[{address}]/page"]
        assert fetch(settings, *urls) == ["private_host", "private_host"]


def test_robots_txt_leads_to_no_private_address_either() -> None:
    behaviours = {"sly.example/page": reply(HTML)}
    with rude_server(behaviours) as server:
        behaviours["sly.example/robots.txt"] = redirect(f"http://{server.address}/robots.txt")
        settings = settings_for(server, resolve={"sly.example": server.address}, contact="me@mail.example")
        (page,) = fetch(settings, "http://sly.example/page")
        assert isinstance(page, FetchedPage)
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


def test_a_server_that_accepts_nobody_is_given_up_at_the_connect_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):  # they fill its queue, and the kernel drops who comes later
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        address = "{}:{}".format(*listener.getsockname())
        settings = settings_for(Server(address), obey_robots=False, retries=1, connect_timeout=0.2, page_timeout=60)
        assert fetch(settings, "http://one.example/") == ["connection"]


def test_a_redirect_to_a_public_host_needs_a_contact() -> None:
    with rude_server({"front.example/": redirect("http://elsewhere.example/")}) as server:
        settings = settings_for(server, resolve={"front.example": server.address})
        assert fetch(settings, "http://front.example/") == ["redirect_refused"]


def lookup_at(server: Server, asked: list[str]) -> Callable[..., list[tuple[Any, ...]]]:
    """A stand-in for `socket.getaddrinfo` that knows one address; hosts it is asked for are appended to `asked`."""
    ip, port = server.address.split(":")

    def lookup(host: str, *_: object) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, int(port)))]

    return lookup


def test_connections_are_used_again_and_names_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    kept = {f"kept.example/{n}": rude.kept(HTML) for n in range(10)}
    closed = {f"closed.example/{n}": reply(HTML) for n in range(10)}
    with rude_server({**kept, **closed}) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lookup_at(server, looked_up))
        settings = settings_for(server, resolve={}, contact="me@mail.example", obey_robots=False)
        outcomes = fetch(settings, *(f"http://{name}" for name in (*kept, *closed)), allow_private=True)
        assert all(isinstance(page, FetchedPage) for page in outcomes)
        assert server.connections == 1 + 10
    assert sorted(looked_up) == ["closed.example", "kept.example"]


def test_a_connection_that_a_server_closed_meanwhile_is_no_failure() -> None:
    # it looks kept, and is not
    closing = rude.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nok")
    pages = {f"one.example/{n}": closing for n in range(100)}
    with rude_server(pages) as server:
        settings = settings_for(server, obey_robots=False, retries=0)
        outcomes = fetch(settings, *(f"http://{name}" for name in pages))
    assert all(isinstance(page, FetchedPage) for page in outcomes)


def test_look_ups_that_hang_cost_their_own_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    with rude_server({"good.example/": reply(HTML)}) as server:
        answer = lookup_at(server, [])

        def lookup(host: str, *arguments: object) -> list[tuple[Any, ...]]:
            if host != "good.example":
                released.wait()
            return answer(host)

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        settings = settings_for(server, resolve={}, contact="me@mail.example", obey_robots=False, concurrency=50)
        urls = [f"http://hung{n}.example/" for n in range(100)]
        try:
            *hung, good = fetch(settings, *urls, "http://good.example/", allow_private=True)
        finally:
            released.set()  # only now: nothing waited for them
    assert hung == ["timeout"] * 100 and isinstance(good, FetchedPage)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = ["-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=self.example"]
    names = ["-addext", "subjectAltName=DNS:self.example"]
    subprocess.run(["openssl", "req", "-x509", *options, *names], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with rude_server({"self.example/": reply(HTML)}, tls=context) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lookup_at(server, []))
        settings = settings_for(server, resolve={}, contact="me@mail.example", obey_robots=False, page_timeout=20)
        assert fetch(settings, "https://self.example/", allow_private=True) == ["tls"]
        assert server.requested == []


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
    assert isinstance(mended, FetchedPage) and (stays, gone) == ("http_503", "http_404")
    assert asked == {"mends.example/": 3, "stays.example/": 3, "gone.example/": 1}


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(form: str) -> None:
    # the date form has whole seconds: two ahead leave at least one
    wait = "1" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    busy = reply(status="429 Too Many Requests", Retry_After=wait)
    with rude_server({"busy.example/": rude.in_turn(busy, reply(HTML))}) as server:
        started = time.monotonic()
        (page,) = fetch(settings_for(server, obey_robots=False), "http://busy.example/")
        assert isinstance(page, FetchedPage) and 0.9 < time.monotonic() - started < 30


def test_nobody_waits_an_hour_for_one_page() -> None:
    busy = reply(status="429 Too Many Requests", Retry_After="3600")
    with rude_server({"busy.example/": busy}) as server:
        assert fetch(settings_for(server, obey_robots=False), "http://busy.example/") == ["http_429"]
        assert server.requested == ["busy.example/"]


@pytest.mark.parametrize("value", ["9" * 20, "9" * 5000, "Wed, 21 Oct 99999999999 07:28:00 GMT", "\u00fc", "-1", "nan"])
def test_a_nonsensical_retry_after_is_a_429_like_any_other(value: str) -> None:
    with rude_server({"busy.example/": reply(status="429 Too Many Requests", Retry_After=value)}) as server:
        assert fetch(settings_for(server, obey_robots=False, retries=1), "http://busy.example/") == ["http_429"]


def test_a_busy_host_rests_as_long_as_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.scrape.fetch._MAX_WAIT", 0.5)
    times: list[float] = []

    async def busy(writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        await reply(status="429 Too Many Requests", Retry_After="3600")(writer)

    with rude_server({"busy.example/1": busy, "busy.example/2": busy}) as server:
        urls = ["http://busy.example/1", "http://busy.example/2"]
        assert fetch(settings_for(server, obey_robots=False), *urls) == ["http_429", "http_429"]
    assert len(times) == 2 and times[1] - times[0] > 0.45


def test_retries_back_off_by_a_jittered_delay_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 1.5 if low < 1.5 else low)  # the jitter's stand-in
    times: list[float] = []

    async def busy(writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        await reply(status="503 Service Unavailable")(writer)

    with rude_server({"busy.example/": busy, "busy.example/other": reply(HTML)}) as server:
        settings = settings_for(server, obey_robots=False, retries=3, retry_delay=0.1)
        urls = ["http://busy.example/", "http://busy.example/other"]
        failed, other = fetch(settings, *urls)
        requested = server.requested
    assert failed == "http_503" and isinstance(other, FetchedPage)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) == 3 and all(gap > 0.95 * 1.5 * 0.1 * 2**n for n, gap in enumerate(gaps)), gaps
    assert requested.count("busy.example/other") == 1


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
    results = ["page" if isinstance(outcome, FetchedPage) else outcome for outcome in outcomes]
    assert results == ["page", "robots", "robots", "page", "robots_unreachable", "robots_unreachable"] * 2
    assert asked.count("none.example/robots.txt") == asked.count("moved.example/robots.txt") == 1
    assert asked.count("broken.example/robots.txt") == 2 and "broken.example/" not in asked
    assert "open.example/private/page" not in asked


def test_no_detour_leads_to_a_path_that_robots_txt_closes() -> None:
    behaviours = {
        "one.example/robots.txt": reply(b"\xef\xbb\xbfUser-agent: *\nDisallow: /p\n", Content_Type="text/plain"),
        "one.example/go": redirect("/x/..%2Fy/../../p"),
        "one.example/q": reply(HTML),
    }
    detours = ("x/../p", "./p", "x/%2e%2e/p", "x\\..\\p", "%70", "go")
    with rude_server(behaviours) as server:
        urls = [f"http://one.example/{path}" for path in (*detours, "x/./../q")]
        *closed, opened = fetch(settings_for(server), *urls)
        requested = set(server.requested)
    assert closed == ["robots"] * len(detours)
    assert isinstance(opened, FetchedPage) and opened.url == "http://one.example/q"
    assert requested == set(behaviours)


def test_a_robots_txt_that_cannot_be_decoded_closes_its_host() -> None:
    rules = b"User-agent: *\nDisallow:\n"
    broken = {
        "cut.example": reply(gzip.compress(rules)[:-9], Content_Encoding="gzip"),
        "odd.example": reply(rules, Content_Encoding="nonsense"),
        "bare.example": reply(gzip.compress(rules)),
    }
    pages = {f"{name}/": reply(HTML) for name in broken}
    with rude_server({**pages, **{f"{name}/robots.txt": answer for name, answer in broken.items()}}) as server:
        assert fetch(settings_for(server), *(f"http://{name}" for name in pages)) == ["robots_unreachable"] * 3
        assert not set(pages) & set(server.requested)


def test_a_robot_that_looks_like_a_browser_obeys_the_rules_for_its_name() -> None:
    rules = b"User-agent: Mozilla\nAllow: /\n\nUser-agent: MyBot/1.0\nDisallow: /p\n"
    behaviours = {"one.example/robots.txt": reply(rules), "one.example/p": reply(HTML), "one.example/q": reply(HTML)}
    with rude_server(behaviours) as server:
        settings = settings_for(server, user_agent="Mozilla/5.0 (compatible; MyBot/1.0; +http://my.example/)")
        closed, opened = fetch(settings, "http://one.example/p", "http://one.example/q")
    assert closed == "robots" and isinstance(opened, FetchedPage)


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

    pages = {f"one.example/{n}": slow for n in range(8)}
    with rude_server(pages) as server:
        settings = settings_for(server, obey_robots=False, host_delay=0.15, page_timeout=20)
        outcomes = fetch(settings, *(f"http://{name}" for name in pages))
    assert all(isinstance(page, FetchedPage) for page in outcomes)
    assert busiest == 1
    waits = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert waits[len(waits) // 2] > 0.13  # the middle one: a busy machine sees some requests late


def test_so_many_requests_are_under_way_and_no_more() -> None:
    under_way = busiest = 0

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, busiest
        under_way += 1
        busiest = max(busiest, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await reply(HTML)(writer)

    with rude_server({f"site{n}.example/": slow for n in range(30)}) as server:
        settings = settings_for(server, obey_robots=False, concurrency=6, page_timeout=20)
        outcomes = fetch(settings, *(f"http://site{n}.example/" for n in range(30)))
    assert all(isinstance(page, FetchedPage) for page in outcomes) and busiest == 6


def test_a_request_says_who_asks_and_brings_no_cookie_back() -> None:
    page = reply(HTML, Set_Cookie="who=you; Path=/")
    with rude_server({"one.example/": page, "one.example/2": page}) as server:
        settings = settings_for(server, obey_robots=False, contact="me@mail.example", user_agent="robot/1.5")
        fetch(settings, "http://one.example/", "http://one.example/2")
    for head in server.heads:
        assert "User-Agent: robot/1.5 (me@mail.example)" in head and not [line for line in head if "ookie" in line]
    assert len(server.heads) == 2


def test_what_no_library_foresaw_is_a_named_reason_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choke(*_: object) -> None:
        raise LookupError("never heard of it")

    with rude_server({"one.example/": reply(HTML)}) as server:
        monkeypatch.setattr("corpus.scrape.fetch.registered_domain", choke)
        assert fetch(settings_for(server), "http://one.example/") == ["unexpected"]
    assert "warning: http://one.example/: LookupError: never heard of it" in capsys.readouterr().err


def test_a_crawl_delay_is_honoured_unless_it_is_absurd() -> None:
    def robots(delay: str) -> rude.Behaviour:
        return reply(f"User-agent: *\nCrawl-delay: {delay}\n".encode(), Content_Type="text/plain")

    pages = {"slow.example/1": reply(HTML), "slow.example/2": reply(HTML), "never.example/": reply(HTML)}
    rules = {"slow.example/robots.txt": robots("0.4"), "never.example/robots.txt": robots("86400")}
    with rude_server({**pages, **rules}) as server:
        started = time.monotonic()
        first, second, never = fetch(settings_for(server), *(f"http://{name}" for name in pages))
        assert 0.35 < time.monotonic() - started < 30
    assert isinstance(first, FetchedPage) and isinstance(second, FetchedPage) and never == "crawl_delay"


def test_robots_txt_that_never_ends_closes_its_host_within_the_deadline() -> None:
    rude_ones = {"drip.example": rude.drip, "endless.example": rude.endless, "bomb.example": rude.gzip_bomb(50_000_000)}
    pages = {f"{name}/robots.txt": behaviour for name, behaviour in rude_ones.items()}
    pages |= {f"{name}/": reply(HTML) for name in rude_ones}
    with rude_server(pages) as server:
        outcomes = fetch(settings_for(server, retries=1, max_bytes=100_000), *(f"http://{name}/" for name in rude_ones))
        assert outcomes == ["robots_unreachable"] * 3
        assert not {f"{name}/" for name in rude_ones} & set(server.requested)


def test_a_robots_txt_that_leads_to_an_ill_host_is_no_permission() -> None:
    pages = {"one.example/robots.txt": redirect("http://ill.other/robots.txt"), "one.example/": reply(HTML)}
    with rude_server({**pages, "ill.other/robots.txt": rude.reset}) as server:
        assert fetch(settings_for(server, retries=0), "http://one.example/") == ["robots_unreachable"]


def test_only_so_many_hosts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.scrape.fetch._MAX_HOSTS", 5)
    pages = {f"site{n}.example/{k}": rude.kept(HTML) for n in range(40) for k in range(3)}

    async def one_after_the_other(settings: ScrapeSettings) -> int:
        async with Fetcher(settings, UrlRules(BlacklistSettings())) as fetcher:
            for name in pages:
                await fetcher.fetch(f"http://{name}")
                fetcher.slots.release()
            return len(fetcher._hosts)

    with rude_server(pages) as server:
        assert asyncio.run(one_after_the_other(settings_for(server))) == 5
        # all at once, none is forgotten while it is at work
        outcomes = fetch(settings_for(server), *(f"http://{name}" for name in pages))
        assert all(isinstance(page, FetchedPage) for page in outcomes)
        requested = server.requested
    assert requested.count("site7.example/robots.txt") == 2  # once a run
