from pathlib import Path

import numpy as np
import pytest

from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.scrape.offline import extract_archives
from tests.corpus.scrape.shards import Shard, article
from tests.helpers import assert_one_line_error, called, read_shard
from tests.rude_server import Server
from tests.warc_records import http, record, write_warc

RULES = BlacklistSettings()


def extracted(*paths: Path, output: Path, workers: int = 1) -> Stats:
    rejects = output.with_name(f"{output.name}.rejects.jsonl")
    return extract_archives(paths, output, ScrapeSettings(), RULES, rejects=rejects, workers=workers)


@pytest.mark.usefixtures("quick_extraction")
def test_the_archive_of_a_crawl_gives_the_records_of_the_crawl(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address, archive=True)
    records = {entry["id"]: entry for entry in read_shard(shard.output)}
    assert any(entry["final_url"] != entry["url"] for entry in records.values())
    listed = np.fromfile(f"{shard.warc}.records", "<u8").reshape(2, -1)[0].tolist()
    assert {int(name, 16) for name in records} <= set(listed) and listed == sorted(listed)
    stats = extracted(shard.warc, output=tmp_path / "again.jsonl")
    again = read_shard(tmp_path / "again.jsonl")
    assert {entry.pop("origin").rpartition(":")[0] for entry in again} == {str(shard.warc)}
    assert {entry["id"]: entry for entry in again} == records
    assert stats.documents_out == len(records) and set(stats.reasons) <= {"extract_empty"}


def test_records_follow_the_files_and_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    pages = [(n, http(article(n) if n % 5 else b"<p>")) for n in range(15)]
    files = [
        write_warc(tmp_path / f"{name}.warc.gz", *(record(f"https://{name}.example/{n}", page) for n, page in pages))
        for name in "ba"
    ]
    others = [
        record("http://www.b.example/1#top", http(article(99))),
        record("https://192.168.0.1/a", http(article(98))),
        record("http://127.0.0.1/inside", http(article(97)), X_Requested_URI="http://old.example/start"),
    ]
    files.append(write_warc(tmp_path / "rules.warc.gz", *others))
    outputs = [tmp_path / "one.jsonl.zst", tmp_path / "three.jsonl.zst"]
    for output, workers in zip(outputs, (1, 3), strict=True):
        stats = extracted(*files, output=output, workers=workers)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    expected = [f"https://{name}.example/{n}" for name in "ba" for n in range(15) if n % 5]
    assert [entry["url"] for entry in read_shard(outputs[0])] == expected
    assert stats.documents_in == 33 and stats.documents_out == len(expected) == 24
    assert stats.reasons == {"extract_empty": 6, "duplicate": 1, "private_host": 1, "redirect_refused": 1}


def test_the_command_takes_folders_and_locates_damage_in_one_line(tmp_path: Path) -> None:
    folder, output = tmp_path / "warc", tmp_path / "pages.jsonl.zst"
    folder.mkdir()
    write_warc(folder / "1.warc.gz", record("https://one.example/1", http(article(1))))
    cut = write_warc(folder / "2.warc.gz", record("https://one.example/2", http(article(2))))
    arguments = ["--output", output, "--stats", tmp_path / "stats.json", "--warc"]
    assert called("corpus.scrape", *arguments, folder).returncode == 0
    assert [entry["title"] for entry in read_shard(output)] == ["Story 1", "Story 2"]
    output.unlink()
    dead = write_warc(tmp_path / "dead.warc", record("http://one.example/1", http(status="404 Not Found")))
    assert_one_line_error(called("corpus.scrape", *arguments, dead), "dead.warc", "1 http_404")
    other = write_warc(tmp_path / "other.warc", record("http://one.example/1", b"<p>", kind="resource"))
    assert_one_line_error(called("corpus.scrape", *arguments, other), "other.warc", "but resource")
    assert_one_line_error(called("corpus.scrape", *arguments, write_warc(tmp_path / "no.warc")), "no record inside")
    cut.write_bytes(cut.read_bytes()[:-7])
    assert_one_line_error(called("corpus.scrape", *arguments, folder), "2.warc.gz", "byte 0")
    assert called("corpus.scrape", *arguments, folder, "--archive", tmp_path / "x").returncode == 2
    assert not output.exists()
