"""A small web, and a shard that tests scrape from it repeatedly."""

from pathlib import Path
from typing import Any

from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.scrape.__main__ import scrape
from demo.pages import Host, page_html
from tests import rude_server as rude
from tests.helpers import prose
from tests.rude_server import Behaviour, Server, redirect, reply

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
    """The files of one shard in a folder, scraped repeatedly."""

    def __init__(self, folder: Path, name: str = "pages") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.output, self.rejects = self.folder / "x.jsonl.zst", self.folder / "x.rejects"
        self.journal = self.folder / "x.jsonl.zst.journal"
        self.finished_journal = self.folder / "x.jsonl.zst.journal.zst"
        self.settings = self.folder / "x.jsonl.zst.settings.json"
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
        """Delete the outputs, as Snakemake does before it reruns a rule."""
        self.output.unlink()
        self.rejects.unlink()


FRESH: dict[str, tuple[bytes, bytes]] = {}


def fresh(tmp_path: Path, server: Server, **changes: Any) -> tuple[bytes, bytes]:
    """The bytes of a scrape from scratch."""
    if str(changes) not in FRESH:
        shard = Shard(tmp_path, f"fresh{len(FRESH)}")
        shard.run(server.address, **changes)
        FRESH[str(changes)] = shard.bytes()
    return FRESH[str(changes)]
