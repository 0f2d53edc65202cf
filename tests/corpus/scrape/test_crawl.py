import asyncio
import os
from pathlib import Path

import pytest

from tests import rude_server as rude
from tests.corpus.scrape.shards import BUSY, Shard
from tests.helpers import read_rejects, read_shard
from tests.rude_server import Behaviour, Server, kept, reply, rude_server

pytestmark = pytest.mark.usefixtures("quick_extraction")


def crawl(shard: Shard, server: Server, pages: dict[str, Behaviour], **changes: object) -> list[str]:
    """Scrape pages; returns `ok` or the reason of each."""
    urls = [f"http://{name}" for name in pages]
    shard.run(server.address, urls, **{"obey_robots": False, "allow_empty": True, **changes})
    outcomes = {record["url"]: "ok" for record in read_shard(shard.output)}
    outcomes |= {record["url"]: record["reason"] for record in read_rejects(shard.rejects)}
    return [outcomes[url] for url in urls]


def test_a_host_that_fails_in_a_row_is_parked_and_affects_no_other(tmp_path: Path) -> None:
    gone = reply(status="410 Gone")  # this resets the count, as a page does
    ill = [BUSY] * 9 + [gone] + [BUSY] * 9 + [kept(b"fine")] + [BUSY] * 20
    pages = {f"ill.example/{n}": page for n, page in enumerate(ill)}
    pages |= {f"good.example/{n}": kept(b"good") for n in range(40)}
    with rude_server(pages) as server:
        outcomes = crawl(Shard(tmp_path), server, pages, host_failures=10)
    busy = ["http_503"] * 9
    assert outcomes == [*busy, "http_410", *busy, "ok", *busy, "http_503", *["host_parked"] * 10, *["ok"] * 40]
    assert sum(name.startswith("ill.") for name in server.requested) == 30


def test_archive_and_journal_are_synced_in_this_order_and_a_disk_that_fails_ends_the_crawl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, synced, disk_full = Shard(tmp_path), list[tuple[Path, int]](), False

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if disk_full and path == shard.journal:
            raise OSError("no space left")
        synced.append((path, os.fstat(descriptor).st_size))

    async def after_a_sync(writer: asyncio.StreamWriter) -> object:
        while not any(path == shard.journal and size for path, size in synced):
            await asyncio.sleep(0.01)
        return await rude.reset(writer)

    monkeypatch.setattr(os, "fsync", sync)
    pages: dict[str, Behaviour] = {"one.example/": kept(b"a page"), "two.example/": after_a_sync}
    with rude_server(pages) as server:
        assert crawl(shard, server, pages, archive=True) == ["ok", "connection"]
        written = [(path, size) for path, size in synced if path in (shard.warc, shard.journal) and size]
        # first the archive's first record; then both files, the archive before the journal
        assert [path for path, _ in written[:3]] == [shard.warc, shard.warc, shard.journal]
        assert written[0][1] < written[1][1] == shard.warc.stat().st_size
        disk_full = True
        with pytest.raises(OSError, match="no space"):
            crawl(shard, server, {"three.example/": rude.silence, **pages})
