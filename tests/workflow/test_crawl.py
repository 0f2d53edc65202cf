from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings import Settings
from workflow.checks import check_crawl
from workflow.snakefile import prepare_run


def settings(run: Path, shards: int) -> Settings:
    (run.parent / "urls.txt").touch()
    return Settings(run=run, urls=[str(run.parent / "urls.txt")], shards=shards)


def test_a_crawl_of_another_number_of_shards_stops_the_run_until_it_is_moved_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    prepare_run(settings(run, 2))
    check_crawl(settings(run, 4))  # nothing is crawled yet
    (run / "pages/0001.warc.gz").touch()
    check_crawl(settings(run, 2))
    for shards in (1, 4):
        with pytest.raises(ConfigError, match="shards: 2"):
            check_crawl(settings(run, shards))
    (run / "pages").rename(run / "pages-2")
    check_crawl(settings(run, 4))
