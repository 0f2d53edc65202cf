import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brotli
import pytest

from corpus.scrape.response import FetchedPage
from tests import rude_server as rude
from tests.corpus.scrape.fetching import HTML, fetch, settings_for
from tests.rude_server import Server, redirect, reply, rude_server


def test_every_rude_response_gives_its_reason_within_its_deadline() -> None:
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


def test_bodies_and_robots_txt_are_read_in_every_coding() -> None:
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
        assert server.connections == 1  # only the front page
        # the same look-up does reach the server if private hosts are allowed
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


def test_robots_txt_cannot_redirect_to_a_private_address() -> None:
    behaviours = {"sly.example/page": reply(HTML)}
    with rude_server(behaviours) as server:
        behaviours["sly.example/robots.txt"] = redirect(f"http://{server.address}/robots.txt")
        settings = settings_for(server, resolve={"sly.example": server.address}, contact="me@mail.example")
        (page,) = fetch(settings, "http://sly.example/page")
        assert isinstance(page, FetchedPage)
        assert server.requested == ["sly.example/robots.txt", "sly.example/page"]


def test_unresolvable_names_and_broken_tls_have_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_server_that_accepts_no_connection_is_given_up_at_the_connect_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):  # they fill its queue, and the kernel drops later connections
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
    """A fake `socket.getaddrinfo` that returns one address and appends each host to `asked`."""
    ip, port = server.address.split(":")

    def lookup(host: str, *_: object) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, int(port)))]

    return lookup


def test_connections_are_reused_and_names_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_idle_connection_closed_by_the_server_is_not_a_failure() -> None:
    # the response looks persistent, but the server closes
    closing = rude.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nok")
    pages = {f"one.example/{n}": closing for n in range(100)}
    with rude_server(pages) as server:
        patient = {"page_timeout": 60, "read_timeout": 60}  # a busy machine must not look like a failure
        settings = settings_for(server, obey_robots=False, retries=0, **patient)
        outcomes = fetch(settings, *(f"http://{name}" for name in pages))
    assert all(isinstance(page, FetchedPage) for page in outcomes), outcomes


def test_hanging_dns_look_ups_cost_only_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
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
            released.set()  # only now: nothing waited for the look-ups
    assert hung == ["timeout"] * 100 and isinstance(good, FetchedPage)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_self_signed_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
