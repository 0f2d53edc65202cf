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
    *("clean/rejects/0002.jsonl.zst",),
    *("decontaminate/0002.counts.json", "tokens/0002_text_document.bin", "tokens/0002_text_document.idx"),
    *("tokens/0002_text_document.json", "clean/0002.jsonl.zst.tmp", "clean/10000.jsonl.zst"),
)
KEPT = (
    *("urls/0001.txt", "urls/stats.json", "clean/0000.jsonl.zst", "tokens/0001_text_document.bin", "clean/notes.txt"),
    *("clean/2024-plans.txt", "clean/2.jsonl.zst", "clean/00002.jsonl.zst", "clean/2024.docx", "dataset/0002.bin"),
    *("dedup/clusters.json", "logs/clean/0003.log", "models/tiny/0003.json"),
)


def test_files_of_shards_that_the_run_does_not_have_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, *STALE, *KEPT)
    (tmp_path / "clean/0005.jsonl.zst").mkdir()
    assert remove_stale(settings(tmp_path, 2)) == len(STALE)
    assert files(tmp_path) == set(KEPT)


@pytest.mark.parametrize(
    "name", ["0002.jsonl.zst", "0003.warc.gz", "0002.jsonl.zst.journal", "0002.jsonl.zst.journal.zst"]
)
def test_a_crawl_of_more_shards_stops_the_run_before_anything_is_removed(tmp_path: Path, name: str) -> None:
    make(tmp_path, "pages/0000.jsonl.zst", f"pages/{name}", *STALE)
    before = files(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_crawl(settings(tmp_path, 2))
    message = str(error.value)
    assert "holds a crawl in" in message and "`shards: 2`" in message and "\n" not in message
    assert f"or move {tmp_path / 'pages'} away" in message
    assert files(tmp_path) == before


def test_a_crawl_of_fewer_shards_stops_the_run_too_until_it_is_moved_away(tmp_path: Path) -> None:
    write_crawl_layout(settings(tmp_path, 2))
    check_crawl(settings(tmp_path, 4))  # nothing is crawled yet
    make(tmp_path, "pages/0001.warc.gz")
    check_crawl(settings(tmp_path, 2))
    with pytest.raises(
        ConfigError, match=r"holds a crawl in 2 shards, and with `shards: 4` every URL .* set `shards: 2`"
    ):
        check_crawl(settings(tmp_path, 4))
    (tmp_path / "pages").rename(tmp_path / "pages-2")
    check_crawl(settings(tmp_path, 4))


def test_a_crawl_of_an_earlier_version_is_known_by_its_lists(tmp_path: Path) -> None:
    make(tmp_path, "urls/0000.txt", "urls/0001.txt", "pages/0000.jsonl.zst")
    check_crawl(settings(tmp_path, 2))
    with pytest.raises(ConfigError, match="a crawl in 2 shards"):
        check_crawl(settings(tmp_path, 4))


def test_a_run_without_urls_has_no_crawl_to_lose(tmp_path: Path) -> None:
    make(tmp_path, "pages/0003.jsonl.zst")
    check_crawl(Settings(run=tmp_path, sources=[{"path": "x"}], shards=2))  # type: ignore[list-item]
    assert files(tmp_path) == {"pages/0003.jsonl.zst"}
