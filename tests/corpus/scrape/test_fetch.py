import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.settings import ScrapeSettings
from corpus.scrape.network import open_session
from corpus.scrape.response import FetchedPage
from tests import rude_server as rude
from tests.corpus.scrape.fetching import HTML, fetch, lookup_at, settings_for
from tests.rude_server import Behaviour, redirect, reply, rude_server

PUBLIC: dict[str, Any] = {"contact": "me@mail.example", "obey_robots": False, "retries": 0}


def test_every_rude_response_gives_its_reason_within_its_deadline() -> None:
    expected = {
        "endless": (rude.endless(b"<p>more</p>" * 1000, 0), "too_large"),
        "bomb": (reply(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip"), "too_large"),
        "large": (rude.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + bytes(100_001)), "too_large"),
        "reset": (rude.reset, "connection"),
        "truncated": (rude.truncated, "connection"),
        "cut-chunk": (rude.cut_chunk, "connection"),
        "negative": (reply(HTML, Content_Length="-5"), "bad_response"),
        "pdf": (reply(b"%PDF-1.4", Content_Type="application/pdf"), "content_type"),
        "damaged": (reply(b"\x1f\x8bnot gzip", Content_Encoding="gzip"), "bad_encoding"),
        "cut-gzip": (reply(gzip.compress(HTML, mtime=0)[:-4], Content_Encoding="gzip"), "bad_encoding"),
        "gone": (reply(status="410 Gone"), "http_410"),
        **{f"moved{n}": (reply(status=f"{n} Moved", Location="/"), "redirect_loop") for n in (301, 302, 303, 307, 308)},
        "to-video": (redirect("https://www.youtube.com/watch?v=1"), "redirect_refused"),
        "to-loopback": (redirect("http://127.0.0.1/"), "redirect_refused"),
    }
    pages = {f"{name}.example/": behaviour for name, (behaviour, _) in expected.items()}
    chain = {f"chain.example/{n}": redirect(f"/{n + 1}") for n in range(6)} | {
        "chain.example/6": reply(bytes(100_000), status="203 Not Theirs")
    }
    packed = gzip.compress(HTML, mtime=0)
    good = {f"good.example/{n}": reply(packed, Content_Encoding="gzip") for n in range(20)}
    urls = [*(f"https://{name}.example/" for name in expected), "https://chain.example/0", "https://chain.example/1"]
    hanging = {"silence.example/": rude.silence, "drip.example/": rude.endless(b"x", 0.05)}
    with rude_server({**pages, **chain, **good, **hanging}) as server:
        settings = settings_for(server, obey_robots=False, max_bytes=100_000, retries=0)
        *outcomes, last = fetch(settings, *(f"http://{name}" for name in good), *urls)
        settings = settings_for(server, 0.5, obey_robots=False, retries=0)
        assert fetch(settings, *(f"https://{name}" for name in hanging)) == ["timeout"] * 2
    pages_of_good = [page for page in outcomes[:20] if isinstance(page, FetchedPage)]
    assert [(page.body, page.raw) for page in pages_of_good] == [(HTML, packed)] * 20
    assert outcomes[20:] == [*(reason for _, reason in expected.values()), "too_many_redirects"]
    assert isinstance(last, FetchedPage), "five redirects, and just as many bytes as are allowed"
    assert last.hops == tuple(f"https://chain.example/{n}" for n in range(2, 6))
    assert (last.requested, last.url) == ("https://chain.example/1", "https://chain.example/6")


def test_odd_answers_are_read_as_browsers_read_them_however_their_bytes_arrive() -> None:
    def arriving(*pieces: bytes) -> Behaviour:
        async def behave(writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)

        return behave

    page = b"<p>one</p>\r\n\r\n<p>two</p>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html, text/html; charset=utf-8\r\nContent-Length: 24\r\n"
    head += b"Connection: close\r\nContent-Encoding: none\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(130))
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n"
    whole = head + b"\r\n" + page + b"too much"
    chunks = head.replace(b"Content-Length: 24", b"Transfer-Encoding: Chunked") + b"\r\n18\r\n" + page
    pages = {
        "together": arriving(whole),
        "hinted": arriving(early + whole),
        "head": arriving(head[:-1], b"\n\r", whole[len(head) + 1 :]),
        "later": arriving(whole[:-8], b"too much"),
        "chunks": arriving(chunks + b"\r\n0\r\n\r\ntoo much"),
    }
    with rude_server({f"{name}.example/": behaviour for name, behaviour in pages.items()}) as server:
        settings = settings_for(server, obey_robots=False, retries=0)
        for name, fetched in zip(pages, fetch(settings, *(f"http://{name}.example/" for name in pages)), strict=True):
            assert isinstance(fetched, FetchedPage), (name, fetched)
            assert (fetched.body, fetched.content_type) == (page, "text/html; charset=utf-8"), name


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 ::ffff:127.0.0.1 169.254.169.254 10.0.0.1 fe80::1 fec0::1 ::127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: "
    "2606:4700::5efe:7f00:1 100::1".split(),
)
def test_an_address_that_is_not_public_is_refused_before_any_packet(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        addresses = [address] if host == "in.example" else [address, "93.184.216.34"]
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses
        ]

    contacted: list[str] = []
    connect = socket.socket.connect

    def noted(self: socket.socket, to: Any) -> None:
        contacted.append(to[0])
        if to[0] != "127.0.0.1":
            raise ConnectionRefusedError
        connect(self, to)

    name = f"[{address}]" if ":" in address else address
    pages = {"one.example/": redirect(f"http://{name}/"), "two.example/": redirect("http://in.example/")}
    pages |= {"robots.example/robots.txt": redirect("http://in.example/robots.txt"), "robots.example/": reply(HTML)}
    pages |= {"literal.example/robots.txt": redirect(f"http://{name}/robots.txt"), "literal.example/": reply(HTML)}
    with rude_server(pages) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        monkeypatch.setattr(socket.socket, "connect", noted)
        resolve = {page.partition("/")[0]: server.address for page in pages}
        settings = settings_for(server, resolve=resolve, **PUBLIC)
        urls = ["http://one.example/", "http://two.example/", "http://in.example/", f"http://{name}/page"]
        assert fetch(settings, *urls) == ["redirect_refused"] * 2 + ["private_host"] * 2
        obeying = settings.model_copy(update={"obey_robots": True})
        for page in fetch(obeying, "http://robots.example/", "http://literal.example/"):
            assert isinstance(page, FetchedPage), "its robots.txt counts as missing"
        assert contacted == ["127.0.0.1"] * len(contacted) and server.connections == len(contacted) == 6
        # of several addresses only the public one is tried
        assert fetch(settings, "http://both.example/") == ["connection"] and contacted[6:] == ["93.184.216.34"]


def test_private_addresses_must_be_allowed_and_public_hosts_need_a_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"front.example/": redirect("http://elsewhere.example/"), "in.example/": reply(HTML)}
    with rude_server(pages) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lookup_at(server))
        settings = settings_for(server, resolve={"front.example": server.address}, **PUBLIC)
        (page,) = fetch(settings, "http://in.example/", allow_private=True)
        assert isinstance(page, FetchedPage)
        assert fetch(settings, f"http://{server.address}/", allow_private=True) == ["http_404"]
        settings = settings.model_copy(update={"contact": ""})
        urls = ["http://front.example/", "http://in.example/"]
        assert fetch(settings, *urls, allow_private=True) == ["redirect_refused", "no_contact"]


def test_connecting_and_reading_have_their_own_time_limits() -> None:
    async def limits() -> aiohttp.ClientTimeout:
        async with open_session(ScrapeSettings(connect_timeout=3, read_timeout=5), allow_private=True) as session:
            return session.timeout

    timeout = asyncio.run(limits())
    assert (timeout.sock_connect, timeout.sock_read) == (3, 5)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_self_signed_certificate_and_a_name_without_address_have_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = ["-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=self.example"]
    names = ["-addext", "subjectAltName=DNS:self.example"]
    subprocess.run(["openssl", "req", "-x509", *options, *names], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with rude_server({"self.example/": reply(HTML)}, tls=context) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lookup_at(server))
        settings = settings_for(server, resolve={}, **PUBLIC)
        urls = ["https://self.example/", "https://nowhere.example/"]
        assert fetch(settings, *urls, allow_private=True) == ["tls", "dns"] and server.requested == []
