"""Drop the URLs that are not worth fetching, and split the rest into shards.

    python -m corpus.blacklist --input urls.txt more/*.xz --output kept.txt --rejects dropped.jsonl
    python -m corpus.blacklist --input RS_2019-12.zst --output-dir urls --shards 64 --stats urls/stats.json

Inputs are files, folders, globs or `-` (stdin), plain or .gz/.bz2/.xz/.zst: one URL a line, or Pushshift submission
dumps (JSON lines). The first reason wins: malformed, scheme, short, private_host, domain, extension, duplicate.
The order of the input is kept. A shard holds whole registered domains, so that politeness to a host is local to it.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import atomic_path, expand_inputs, optional_writer, read_lines
from common.progress import Meter
from common.settings import BlacklistSettings
from common.stats import Stats
from corpus.urls import UrlRules, registered_domain

_FLUSH = 1_000_000  # URLs held before the shards are appended to; bounds memory, whatever the number of shards


def _submission(line: bytes, settings: BlacklistSettings) -> tuple[str, str | None]:
    """URL of a Pushshift submission, and why it is skipped."""
    try:
        entry: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line.decode("utf-8", "replace"), "malformed"
    url = entry.get("url")
    if not isinstance(url, str):
        return line.decode("utf-8", "replace"), "malformed"
    if entry.get("over_18") and not settings.over_18:
        return url, "over_18"
    if entry.get("is_self") and not settings.self_posts:
        return url, "self_post"
    score = entry.get("score", settings.min_score)
    return url, "score" if isinstance(score, int | float) and score < settings.min_score else None


def read_urls(paths: Iterable[Path], settings: BlacklistSettings) -> Iterator[tuple[str, str | None]]:
    """Every entry of the lists in order: (URL, reason to skip it before the URL rules, or None).

    Blank lines and lines that begin with `#` are no entries.
    """
    for path in paths:
        for line in read_lines(path):
            line = line.strip()
            if not line or line.startswith(b"#"):
                continue
            if line.startswith(b"{"):
                yield _submission(line, settings)
                continue
            try:
                yield line.decode("utf-8"), None
            except UnicodeDecodeError:
                yield line.decode("utf-8", "replace"), "malformed"


def filter_urls(entries: Iterable[tuple[str, str | None]], rules: UrlRules) -> Iterator[tuple[str, str, str | None]]:
    """(URL as it will be fetched, its host, reason to drop it or None) for every entry, in order.

    Remembers 8 bytes of hash for each URL kept, not the URL.
    """
    seen: set[int] = set()
    for url, skip in entries:
        parsed, reason = rules.check(url)
        reason = skip or reason
        if parsed is None or reason:
            yield url, "", reason
            continue
        digest = hashlib.blake2b(parsed.canonical.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        if key in seen:
            yield url, "", "duplicate"
        else:
            seen.add(key)
            yield parsed.text, parsed.host, None


def shard_of(host: str, shards: int) -> int:
    """Shard of a host's registered domain: a hash, so that it never depends on the list."""
    digest = hashlib.sha256(registered_domain(host).encode()).digest()
    return int.from_bytes(digest[:8], "big") % shards


def blacklist(
    inputs: Sequence[Path], outputs: Sequence[Path], settings: BlacklistSettings, rejects: Path | None = None
) -> Stats:
    """Filter URL lists into one text file a shard, all of them or none.

    Raises EmptyResultError when no URL is left, InputError when there was none to begin with.
    """
    stats = Stats("blacklist")
    pending: list[list[str]] = [[] for _ in outputs]
    with ExitStack() as stack:
        temporaries = [stack.enter_context(atomic_path(path)) for path in outputs]
        reject = stack.enter_context(optional_writer(rejects))
        meter = stack.enter_context(Meter("blacklist", "URLs"))

        def flush() -> None:
            # appended and closed: a thousand shards are more files than a process may hold open
            for path, urls in zip(temporaries, pending, strict=True):
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(f"{url}\n" for url in urls)
                urls.clear()

        for url, host, reason in filter_urls(read_urls(inputs, settings), UrlRules(settings)):
            stats.documents_in += 1
            stats.bytes_in += len(url.encode())
            meter.advance()
            if reason:
                stats.reasons[reason] += 1
                reject({"url": url, "reason": reason})
                continue
            stats.keep(len(url.encode()))
            pending[shard_of(host, len(outputs))].append(url)
            if stats.documents_out % _FLUSH == 0:
                flush()
        flush()
        names = ", ".join(map(str, inputs))
        if not stats.documents_in:
            raise InputError(f"{names}: no URLs inside; give a list with one URL a line")
        if not stats.documents_out:
            raise EmptyResultError(f"{names}: none of {stats.documents_in} URLs is left ({stats.dropped()})")
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.blacklist", __doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="URL lists")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=Path, metavar="FILE", help="the URLs that are kept")
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="folder for the shards 0000.txt, 0001.txt, …")
    parser.add_argument("--shards", type=int, metavar="N", help="number of shards in --output-dir")
    parser.add_argument("--rejects", type=Path, metavar="FILE", help="dropped URLs with their reasons (JSON lines)")
    parser.add_argument("--stats", type=Path, metavar="FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read the section `blacklist`")
    arguments = parser.parse_args(argv)
    if (arguments.output_dir is None) != (arguments.shards is None):
        parser.error("--output-dir and --shards belong together")
    if arguments.shards is not None and arguments.shards < 1:
        parser.error("--shards must be at least 1")
    settings = step_settings(arguments.config).blacklist
    outputs = (
        [arguments.output]
        if arguments.output
        else [arguments.output_dir / f"{shard:04d}.txt" for shard in range(arguments.shards)]
    )
    stats = blacklist(expand_inputs(arguments.input), outputs, settings, arguments.rejects)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
