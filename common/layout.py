"""Files of a run that belong to another number of shards: removed where they are cheap, refused where they are not.

Every rule names its inputs shard by shard, so a file of another layout is never read. It is removed when a run starts,
so that nobody takes it for a part of the corpus. Crawled pages and archives cost days: they are never removed. A crawl
belongs to its number of shards (a host's URLs go to one of them), so with another number a run stops before it starts.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import ConfigError
from common.files import read_json, write_json
from common.settings import Settings

CHEAP = ("urls", "ingest", "clean", "dedup", "decontaminate", "tokens")
CRAWL = "pages"
_LAYOUT = "layout.json"  # in the folder of the crawl: it moves along with the pages
# 0003.txt, 0003.rejects.jsonl.zst, 0003.stats.json, 0003_text_document.idx: what the rules write, and nothing of others
_OURS = re.compile(
    r"(\d{4,})(_text_document)?(\.(rejects|stats|counts|jsonl))*\.(txt|zst|json|bin|idx|signatures)(\.tmp)?"
)
_CRAWLED = re.compile(r"(\d{4,})\..+")


def _numbered(paths: Iterable[Path], pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """The shard's number and the path of everything that is named after a shard."""
    for path in paths:
        match = pattern.fullmatch(path.name)
        if match and f"{int(match[1]):04d}" == match[1]:
            yield int(match[1]), path


def remove_stale(settings: Settings) -> int:
    """Remove the files of shards that this run does not have, pages and archives excepted; how many there were."""
    removed = 0
    for name in CHEAP:
        for shard, path in list(_numbered((settings.run / name).rglob("*"), _OURS)):
            if shard >= settings.shards and path.is_file():
                path.unlink()
                removed += 1
    return removed


def _crawled_shards(settings: Settings, last: int) -> int:
    """Over how many shards the pages that are there were crawled, given the last of them that is there."""
    recorded = settings.run / CRAWL / _LAYOUT
    if recorded.is_file():
        found = read_json(recorded)
        if isinstance(found, dict) and isinstance(found.get("shards"), int):
            return max(int(found["shards"]), last + 1)
    if last >= settings.shards:
        return last + 1
    # a run of an earlier version: the URL lists tell
    lists = [shard for shard, path in _numbered((settings.run / "urls").glob("*"), _OURS) if path.suffix == ".txt"]
    return max(lists) + 1 if lists and max(lists) + 1 < settings.shards else settings.shards


def check_crawl(settings: Settings) -> None:
    """ConfigError where pages are there that were crawled over another number of shards; changes nothing."""
    folder = settings.run / CRAWL
    if not settings.urls or not folder.is_dir():
        return
    crawled = {shard for shard, _ in _numbered(folder.iterdir(), _CRAWLED)}
    if not crawled:
        return
    shards = _crawled_shards(settings, max(crawled))
    if shards != settings.shards:
        raise ConfigError(
            f"{folder} holds a crawl in {shards} shards, and with `shards: {settings.shards}` every URL of it would "
            f"be fetched again; set `shards: {shards}`, or move {folder} away to crawl again"
        )


def write_crawl_layout(settings: Settings) -> None:
    """Record the number of shards beside the pages, before the first one is fetched."""
    path = settings.run / CRAWL / _LAYOUT
    layout = {"shards": settings.shards}
    if settings.urls and not (path.is_file() and read_json(path) == layout):
        write_json(path, layout)
