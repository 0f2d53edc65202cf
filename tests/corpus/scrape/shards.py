"""A small web, and a shard that tests scrape from it repeatedly."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.scrape.__main__ import scrape
from tests import rude_server as rude
from tests.helpers import prose
from tests.rude_server import Behaviour, Server, redirect, reply
from workflow.demo.pages import Host, page_html

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "main")
DOWN = "127.0.0.1:9"
BUSY = reply(status="503 Service Unavailable")
BIG = 150_000  # twice as many bytes
PLAIN = "gęślą jaźń!!"
QUICK: dict[str, Any] = {"host_delay": 0, "retries": 0, "page_timeout": 600, "read_timeout": 600, "host_failures": 3}


def article(number: int) -> bytes:
    return page_html(HOST, f"Story {number}", prose(number, 150), number=number).encode()


PAGES: dict[str, Behaviour] = {
    **{f"site{n % 4}.example/{n}": reply(article(n)) for n in range(12)},
    "plain.example/": reply(PLAIN.encode("iso8859_2"), Content_Type="text/plain; charset=latin2"),
    "empty.example/": reply(b"<html></html>"),
    "big.example/": reply(b"b " * BIG, Content_Type="text/plain"),
    "moved.example/": redirect("http://middle.example/"),
    "middle.example/": redirect("http://site1.example/1"),
    "far.example/": redirect("http://moved.example/"),
    "video.example/": redirect("http://www.youtube.com/watch"),
    "secret.example/robots.txt": reply(b"User-agent: *\nDisallow: /", Content_Type="text/plain"),
    "secret.example/": reply(article(90)),
    "secret.example/2": reply(article(91)),
    "reset.example/": rude.reset,
    "ill.example/good": reply(article(92)),
    **{f"ill.example/{n}": BUSY for n in range(5)},
}
URLS = [
    *(f"http://{name}" for name in PAGES if not name.endswith("robots.txt")),
    "http://www.site1.example/1#top",
    "http://site2.example/photo.jpg",
    "http://site3.example/404",
]


class Shard:
    """The files of one shard in a folder, scraped repeatedly."""

    def __init__(self, folder: Path, name: str = "pages") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.urls, self.warc = self.folder / "urls.txt", self.folder / "x.warc.gz"
        self.output, self.rejects = self.folder / "x.jsonl.zst", self.folder / "x.rejects"
        self.journal, self.settings = (self.folder / f"x.jsonl.zst.{name}" for name in ("journal", "settings.json"))

    def run(self, address: str, urls: list[str] | None = None, **changes: Any) -> Stats:
        options = {key: changes.pop(key) for key in ("allow_empty", "refetch", "workers") if key in changes}
        archive = self.warc if changes.pop("archive", False) else None
        rules = BlacklistSettings(**changes.pop("blacklist", {}))
        settings = ScrapeSettings(**{"resolve": {"*": address}, **QUICK, **changes})
        self.write_list(URLS if urls is None else urls)
        return scrape(self.urls, self.output, settings, rules, archive=archive, rejects=self.rejects, **options)

    def write_list(self, urls: Iterable[str]) -> None:
        """Write the list."""
        self.urls.write_text("".join(f"{url}\n" for url in urls))

    def arguments(self, address: str) -> list[str]:
        """The same run as arguments of the command."""
        paths = {"--urls": self.urls, "--output": self.output, "--rejects": self.rejects}
        options = [str(part) for pair in paths.items() for part in pair] + [f'scrape.resolve={{"*": {address}}}']
        return [*options, *(f"scrape.{key}={value}" for key, value in QUICK.items())]

    def bytes(self) -> tuple[bytes, bytes]:
        return self.output.read_bytes(), self.rejects.read_bytes()


FRESH: dict[str, tuple[bytes, bytes]] = {}


def fresh(tmp_path: Path, server: Server, **changes: Any) -> tuple[bytes, bytes]:
    """The bytes of a scrape from scratch."""
    if str(changes) not in FRESH:
        shard = Shard(tmp_path, f"fresh{len(FRESH)}")
        shard.run(server.address, **changes)
        FRESH[str(changes)] = shard.bytes()
    return FRESH[str(changes)]
