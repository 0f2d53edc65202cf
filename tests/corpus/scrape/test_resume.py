"""Resuming from an archive, and after a kill at the end of the run before."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, InputError
from tests.conftest import ROOT, Command
from tests.corpus.scrape.shards import DOWN, URLS, Shard, fresh
from tests.rude_server import Server

pytestmark = pytest.mark.usefixtures("quick_extraction")


# ------------------------------------------------------------------------------------------------ the archive


def test_an_archive_alone_restores_a_finished_crawl(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    for path in shard.folder.iterdir():
        if path != shard.warc:
            path.unlink()
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert shard.bytes() == before and shard.warc.read_bytes() == warc
    assert stats.extra["extracted_again"] == 19
    assert not {"site0.example/0", "plain.example/", "big.example/", "moved.example/"} & set(server.requested)


def test_an_archive_turned_on_late_says_what_it_lacks_and_stores_only_new_pages(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, URLS[:6])
    assert shard.run(server.address, URLS[:9], archive=True).extra["fetched"] == 3
    assert "6 known pages are not in" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"6 URLs would be fetched again"):
        shard.run(server.address, URLS[:9], archive=True, extractors=["newspaper3k"])
    with pytest.raises(ConfigError, match=r"9 URLs would be fetched again, 3 of them are in its archive"):
        shard.run(server.address, URLS[:9], extractors=["newspaper3k"])
    stats = shard.run(server.address, URLS[:9], archive=True, extractors=["newspaper3k"], refetch=True)
    assert (stats.extra["fetched"], stats.extra["extracted_again"]) == (6, 3)


def test_a_missing_or_damaged_archive_is_reported(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    shard.warc.write_bytes(warc[:-100])
    with pytest.raises(InputError, match="shorter than the journal"):
        shard.run(server.address, archive=True)
    damaged = bytearray(warc)
    damaged[len(warc) // 2] ^= 0xFF
    shard.warc.write_bytes(damaged)
    with pytest.raises(InputError, match=r"the record at byte \d+ \(http.*\) is damaged"):
        shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    stats = shard.run(server.address, archive=True, extractors=["newspaper3k"], refetch=True)
    assert stats.extra["fetched"] == 1 and shard.bytes() == fresh(tmp_path, server, extractors=["newspaper3k"])
    shard.warc.unlink()
    shard.run(DOWN, archive=True, extractors=["newspaper3k"])
    assert "is gone; the texts of its pages are known" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="17 URLs would be fetched again;"):
        shard.run(DOWN, archive=True)
    assert shard.run(server.address, archive=True, refetch=True).extra["fetched"] == 17
    assert shard.bytes() == before and shard.run(DOWN, archive=True).extra["fetched"] == 0


# ------------------------------------------------------------------------------------------------ the end of a run


@pytest.mark.parametrize(
    "place",
    [
        "corpus.scrape.journal.write_zstd_lines",
        "corpus.scrape.zstd_lines.atomic_path",
        "corpus.scrape.__main__.Stats.finish",
    ],
)
def test_a_kill_while_the_shard_is_finished_changes_nothing(
    place: str, tmp_path: Path, server: Server, command: Command
) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    before, warc = shard.bytes(), shard.warc.read_bytes()
    for path in shard.folder.iterdir():
        if path not in (shard.warc, shard.folder / "urls.txt"):
            path.unlink()
    settings = tmp_path / "config.yaml"
    settings.write_text("run: x\nurls: [x]\nscrape: {retries: 0, host_delay: 0, page_timeout: 5, host_failures: 3}\n")
    # kill -9 from inside, at the very call
    (tmp_path / "killed.py").write_text(
        "import os, signal, sys, importlib\n"
        "from corpus.scrape import __main__ as scrape, journal, zstd_lines\n"
        f"path = {place!r}.split('.')\n"
        "target = importlib.import_module('.'.join(path[:2]))\n"
        "for part in path[2:-1]: target = getattr(target, part)\n"
        "setattr(target, path[-1], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))\n"
        "scrape.main(sys.argv[1:])\n"
    )
    arguments = ["--urls", shard.folder / "urls.txt", "--output", shard.output, "--rejects", shard.rejects]
    arguments += ["--archive", shard.warc, "--config", settings, "--resolve", f"*={server.address}"]
    arguments += ["--stats", shard.folder / "stats.json"]
    killed = subprocess.run([sys.executable, tmp_path / "killed.py", *map(str, arguments)], cwd=ROOT, timeout=120)
    assert killed.returncode == -9
    server.requested.clear()
    stats = shard.run(server.address, archive=True)
    assert shard.bytes() == before and shard.warc.read_bytes() == warc
    assert not server.requested and stats.extra["fetched"] == 0 and not list(shard.folder.glob("*.tmp"))
    assert not shard.journal.exists() and shard.finished_journal.exists()
