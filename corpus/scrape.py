"""Fetch the pages of a URL list politely, extract their text, and write them in the list's order.

    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --config config.yaml --workers 8
    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --resolve '*=127.0.0.1:8080' --archive raw.warc.gz

A killed run goes on where it was (OUTPUT.journal); two runs over the same pages write the same bytes. Public hosts
are only contacted when the key scrape.contact of the configuration says who is asking.
"""

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError
from common.files import document_writer, optional_writer, read_lines
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats

if TYPE_CHECKING:
    from corpus.journal import Journal


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
    shaping = settings.model_dump(
        include={"extractors", "min_extracted", "max_bytes", "max_redirects", "obey_robots"}, mode="json"
    )
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
    from corpus.journal import Journal

    listed = read_urls(urls)
    if not listed and not allow_empty:
        raise InputError(f"{urls}: no URLs inside; give a list with one URL a line")
    planned = plan(listed, settings, blacklist)
    stats = Stats("scrape")
    path = output.with_name(output.name + ".journal")
    with Journal(path, owner_of(listed, settings, blacklist, archive), len(listed)) as journal:
        stats.extra["resumed"] = journal.finished
        if journal.finished:
            print(f"scrape: {journal.finished} of {len(listed)} URLs are settled already ({path})", file=sys.stderr)
        try:
            asyncio.run(crawl(planned, settings, blacklist, journal, archive, workers))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first task to fail; the others were cancelled
        try:
            _write(listed, journal, output, rejects, stats, allow_empty)
        except EmptyResultError as error:
            journal.remove()  # or the next run, with the network mended, would believe it
            raise EmptyResultError(f"{urls}: {error}") from None
        journal.remove()
    return stats


def _write(
    urls: Sequence[str], journal: "Journal", output: Path, rejects: Path | None, stats: Stats, allow_empty: bool
) -> None:
    """The settled URLs as a shard and its rejects, in the list's order; all of it or nothing."""
    extractors: Counter[str] = Counter()
    with optional_writer(rejects) as reject, document_writer(output) as write:
        for position, url in enumerate(urls):
            outcome = journal.outcome(position)
            stats.documents_in += 1
            if "reason" in outcome:
                stats.reasons[outcome["reason"]] += 1
                reject({"url": url, "reason": outcome["reason"]})
                continue
            record = outcome["record"]
            stats.bytes_in += outcome["bytes"]
            stats.keep(len(record["text"].encode()))
            extractors[record["extractor"]] += 1
            write(record)
        if not stats.documents_out and not allow_empty:
            raise EmptyResultError(f"no text from any of {len(urls)} URLs ({stats.dropped()})")
    stats.extra["extractors"] = dict(sorted(extractors.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.scrape", __doc__)
    parser.add_argument("--urls", type=Path, required=True, metavar="FILE", help="one URL a line")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="shard of pages (.jsonl.zst)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="raw responses (.warc.gz)")
    parser.add_argument(
        "--resolve", nargs="+", action="extend", default=[], metavar="HOST=IP:PORT", help="added to scrape.resolve"
    )
    cli.add_step_options(parser, "scrape")
    arguments = parser.parse_args(argv)
    whole = step_settings(arguments.config)
    resolve = dict(whole.scrape.resolve)
    for entry in arguments.resolve:
        host, separator, address = entry.partition("=")
        if not separator:
            parser.error(f"--resolve {entry}: must read HOST=IP:PORT")
        resolve[host] = address
    stats = scrape(
        arguments.urls,
        arguments.output,
        whole.scrape.model_copy(update={"resolve": resolve}),
        whole.blacklist,
        archive=arguments.archive,
        rejects=arguments.rejects,
        workers=arguments.workers,
        allow_empty=arguments.allow_empty,
    )
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
