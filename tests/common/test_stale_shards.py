from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings import Settings
from common.stale_shards import check_crawl, remove_stale, write_crawl_layout


def settings(run: Path, shards: int) -> Settings:
    return Settings(run=run, urls=["-"], shards=shards)


def make(run: Path, *names: str) -> None:
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()


def files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


STALE = (
    *("urls/0002.txt", "ingest/0003.jsonl.zst", "clean/0002.jsonl.zst", "clean/0002.rejects.jsonl.zst"),
    *("clean/0002.stats.json", "dedup/removed/0002.jsonl.zst", "dedup/work/0002.signatures", "tokens/0003.stats.json"),
    *("clean/rejects/0002.jsonl.zst", "decontaminate/0002.counts.json", "tokens/0002_text_document.bin"),
    *("clean/0002.jsonl.zst.tmp", "clean/10000.jsonl.zst"),
)
KEPT = (
    *("urls/0001.txt", "urls/stats.json", "clean/0000.jsonl.zst", "tokens/0001_text_document.bin", "clean/notes.txt"),
    *("clean/2024-plans.txt", "clean/2.jsonl.zst", "clean/00002.jsonl.zst", "clean/2024.docx", "dataset/0002.bin"),
    *("dedup/clusters.json", "logs/clean/0003.log", "models/tiny/0003.json"),
)


def test_files_of_shards_that_the_run_does_not_have_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, *STALE, *KEPT)
    assert remove_stale(settings(tmp_path, 2)) == len(STALE)
    assert files(tmp_path) == set(KEPT)


def test_a_crawl_of_another_number_of_shards_stops_the_run_until_it_is_moved_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_crawl_layout(settings(run, 2))
    check_crawl(settings(run, 4))  # nothing is crawled yet
    make(run, "pages/0001.warc.gz", *STALE)
    before = files(run)
    check_crawl(settings(run, 2))
    for shards in (1, 4):
        with pytest.raises(ConfigError, match="shards: 2"):
            check_crawl(settings(run, shards))
    assert files(run) == before
    (run / "pages").rename(run / "pages-2")
    check_crawl(settings(run, 4))
