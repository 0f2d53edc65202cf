"""Handles the files that an earlier number of shards left in a run: cheap ones are removed, crawled pages never.

Every rule names its inputs shard by shard, so stale files are never read; `remove_stale` deletes them when a run starts
so that nobody mistakes them for part of the corpus. Crawled pages and archives cost days. A crawl belongs to its number
of shards, because all URLs of a host go to one shard, so with another number `check_crawl` stops the run.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import ConfigError
from common.files import read_json, shard_name, write_json
from common.settings import Settings

CHEAP = ("urls", "ingest", "clean", "dedup", "decontaminate", "tokens")
CRAWL = "pages"
_LAYOUT = "layout.json"  # inside the crawl's folder, so that it moves with the pages
# Names that the rules write: 0003.txt, 0003.rejects.jsonl.zst, 0003.stats.json, 0003_text_document.idx
_OURS = re.compile(
    r"(\d{4,})(_text_document)?(\.(rejects|stats|counts|jsonl))*\.(txt|zst|json|bin|idx|signatures)(\.tmp)?"
)
_CRAWLED = re.compile(r"(\d{4,})\..+")


def _numbered(paths: Iterable[Path], pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """(shard number, path) of each path that is named after a shard."""
    for path in paths:
        match = pattern.fullmatch(path.name)
        if match and shard_name(int(match[1])) == match[1]:
            yield int(match[1]), path


def remove_stale(settings: Settings) -> int:
    """Remove the files of shards that this run does not have, except pages and archives. Returns how many."""
    removed = 0
    for name in CHEAP:
        for shard, path in list(_numbered((settings.run / name).rglob("*"), _OURS)):
            if shard >= settings.shards and path.is_file():
                path.unlink()
                removed += 1
    return removed


def _crawled_shards(settings: Settings, last: int) -> int:
    """The number of shards of the existing crawl, whose last shard is `last`."""
    recorded = settings.run / CRAWL / _LAYOUT
    if recorded.is_file():
        found = read_json(recorded)
        if isinstance(found, dict) and isinstance(found.get("shards"), int):
            return max(int(found["shards"]), last + 1)
    if last >= settings.shards:
        return last + 1
    # a crawl of an earlier version without layout.json: count the URL lists
    lists = [shard for shard, path in _numbered((settings.run / "urls").glob("*"), _OURS) if path.suffix == ".txt"]
    return max(lists) + 1 if lists and max(lists) + 1 < settings.shards else settings.shards


def check_crawl(settings: Settings) -> None:
    """Raise ConfigError if the run has pages that were crawled with another number of shards. Changes nothing."""
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
