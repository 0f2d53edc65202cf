"""Fetch the pages of a URL list politely, extract their text, and write them in the list's order.

    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --config config.yaml --workers 8
    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --resolve '*=127.0.0.1:8080' --archive raw.warc.gz
    python -m corpus.scrape --warc raw.warc.gz CC-MAIN-*.warc.gz --output pages.jsonl.zst --workers 8

A run that was stopped goes on where it was (OUTPUT.journal); two runs over the same pages write the same bytes. Public
hosts are only contacted when the key scrape.contact of the configuration says who is asking. From WARC files (our own
or Common Crawl's; files, folders or globs) the same rules make the same records, without a network.
"""

import asyncio
import hashlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import beside, expand_inputs, read_lines, require_regular
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats


def read_urls(path: Path) -> list[str]:
    """The URLs of a list, one a line; blank lines are skipped. InputError names a line that is no UTF-8."""
    urls = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            if url := line.decode("utf-8").strip():
                urls.append(url)
        except UnicodeDecodeError:
            raise InputError(f"{path}:{number}: not UTF-8; run the list through corpus.blacklist first") from None
    return urls


def owner_of(
    urls: Sequence[str], settings: ScrapeSettings, blacklist: BlacklistSettings, archive: Path | None
) -> dict[str, Any]:
    """What a journal belongs to: the list, everything that shapes the result, and whether there is an archive."""
    shaping = settings.model_dump(include={"extractors", "max_bytes", "max_redirects", "obey_robots"}, mode="json")
    libraries = [version(name) for name in ("trafilatura", "newspaper3k", "lxml")]
    shape = f"{shaping} {blacklist.model_dump(mode='json')} {libraries}"
    return {
        "urls": hashlib.sha256("\n".join(urls).encode()).hexdigest(),
        "settings": hashlib.sha256(shape.encode()).hexdigest(),
        "archive": archive is not None,
    }


def scrape(
    urls: Path,
    output: Path,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    *,
    archive: Path | None = None,
    rejects: Path | None = None,
    workers: int = 1,
    allow_empty: bool = False,
) -> Stats:
    """Scrape the list `urls` into the shard `output`. Raises EmptyResultError when not one page has text."""
    from corpus.crawl import crawl, plan
    from corpus.host_stats import largest_hosts
    from corpus.journal import Journal
    from corpus.pages import outcome_writer

    listed = read_urls(urls)
    if not listed and not allow_empty:
        raise InputError(f"{urls}: no URLs inside; give a list with one URL a line")
    planned = plan(listed, settings, blacklist)
    stats = Stats("scrape")
    with (
        beside(output, ".journal") as path,
        Journal(path, owner_of(listed, settings, blacklist, archive), len(listed)) as journal,
    ):
        stats.extra["resumed"] = journal.finished
        if journal.finished:
            print(f"scrape: {journal.finished} of {len(listed)} URLs are settled already ({path})", file=sys.stderr)
        try:
            asyncio.run(crawl(planned, settings, blacklist, journal, archive, workers))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except (KeyboardInterrupt, asyncio.CancelledError) as stop:  # Ctrl-C; SIGTERM, at a job's time limit
            print(
                f"scrape: {journal.finished} of {len(listed)} URLs are settled; run it again to go on", file=sys.stderr
            )
            if isinstance(stop, asyncio.CancelledError):
                sys.exit(128 + signal.SIGTERM)
            raise
        try:
            with outcome_writer(output, rejects, stats, allow_empty) as write:
                for position, url in enumerate(listed):
                    write(url, journal.outcome(position))
        except EmptyResultError as error:
            journal.remove()  # or the next run, with the network mended, would believe it
            raise EmptyResultError(f"{urls}: {error}") from None
        stats.extra["hosts"] = largest_hosts(planned, journal)
        journal.remove()
    return stats


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group of tasks; the others were cancelled."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.scrape", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--urls", type=cli.input_path, metavar="FILE", help="one URL a line")
    source.add_argument(
        "--warc", type=cli.any_files, nargs="+", metavar="PATH", help="WARC files: recorded pages instead of the web's"
    )
    parser.add_argument(
        "--output", type=cli.output_file, required=True, metavar="FILE", help="shard of pages (.jsonl.zst)"
    )
    parser.add_argument("--archive", type=cli.regular_file, metavar="FILE", help="raw responses (.warc.gz)")
    parser.add_argument(
        "--resolve", nargs="+", action="extend", default=[], metavar="HOST=IP:PORT", help="added to scrape.resolve"
    )
    cli.add_step_options(parser, "scrape")
    arguments = parser.parse_args(argv)
    whole = step_settings(arguments.config)
    options: dict[str, Any] = {key: getattr(arguments, key) for key in ("rejects", "workers", "allow_empty")}
    if arguments.warc:
        if arguments.archive or arguments.resolve:
            parser.error("--archive and --resolve are for --urls: --warc uses no network")
        from corpus.warc import extract_archives

        paths = expand_inputs(arguments.warc)
        require_regular(paths, "corpus.scrape --warc")
        extract_archives(paths, arguments.output, whole.scrape, whole.blacklist, **options).finish(arguments.stats)
        return 0
    from corpus.host_stats import table

    resolve = dict(whole.scrape.resolve)
    for entry in arguments.resolve:
        host, separator, address = entry.partition("=")
        if not separator:
            parser.error(f"--resolve {entry}: must read HOST=IP:PORT")
        resolve[host] = address
    settings = whole.scrape.model_copy(update={"resolve": resolve})
    stats = scrape(arguments.urls, arguments.output, settings, whole.blacklist, archive=arguments.archive, **options)
    stats.finish(arguments.stats)
    print(table(stats.extra["hosts"]))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
