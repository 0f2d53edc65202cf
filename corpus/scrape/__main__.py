"""Fetch the pages of a URL list politely, extract their text, and write them in the list's order.

    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --config config.yaml --workers 8
    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --resolve '*=127.0.0.1:8080' --archive raw.warc.gz
    python -m corpus.scrape --warc raw.warc.gz CC-MAIN-*.warc.gz --output pages.jsonl.zst --workers 8

What was found out of a URL is kept beside the output (OUTPUT.journal.zst), for this list and any later one: a run that
was stopped goes on where it was, a finished one fetches only URLs that are new. When a changed key needs pages again
(extractors, a larger max_bytes), they come from the archive; where that has not got them the run stops and says what it
would fetch again, until --refetch, or the deletion of OUTPUT.settings.json, agrees to it. Two runs over the same pages
write the same bytes. When no host answers at all, nothing is recorded and the exit code is 2, also with --allow-empty.

Public hosts are only contacted when the key scrape.contact of the configuration says who is asking. From WARC files
(our own or Common Crawl's; files, folders or globs) the same rules make the same records, without a network.
"""

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.config import step_settings
from common.errors import EmptyResultError, InputError, OutageError
from common.files import beside, expand_inputs, read_lines, require_regular
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats

if TYPE_CHECKING:
    from corpus.scrape.archive import Archive
    from corpus.scrape.crawl import Crawl
    from corpus.scrape.journal import Journal
    from corpus.scrape.known import Known
    from corpus.scrape.pages import Outcome
    from corpus.scrape.queues import Plan


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
    refetch: bool = False,
    site: Path | None = None,
) -> Stats:
    """Scrape the list `urls` into the shard `output`; what earlier runs found out is not fetched again.

    Raises EmptyResultError when not one page has text, OutageError when the network is down, ConfigError when changed
    settings need pages again that only the network has; `refetch` agrees to that. `site` is the folder of a recorded
    site that answers instead of the web: when it changes, nothing that was found out before counts.
    """
    from corpus.scrape.host_stats import largest_hosts
    from corpus.scrape.journal import Journal
    from corpus.scrape.known import Known, made_with
    from corpus.scrape.pages import outcome_writer
    from corpus.scrape.queues import check_contact, plan

    listed = read_urls(urls)
    if not listed and not allow_empty:
        raise InputError(f"{urls}: no URLs inside; give a list with one URL a line")
    planned = plan(listed, blacklist)
    stats = Stats("scrape")
    stats.extra["libraries"] = {name: version(name) for name in ("trafilatura", "newspaper3k", "lxml", "turbohtml")}
    made = made_with(settings) | ({"site": _digest(site)} if site else {})
    with (
        beside(output, "") as place,
        Journal(place, listed, planned.keys, made) as journal,
        ExitStack() as stack,
    ):
        recorded = _open_archive(archive, journal, planned, settings, stack)
        known = Known(journal, settings, blacklist, archive=recorded is not None)
        check_contact(planned, known)
        known.agree(planned.positions(), refetch)
        crawling = _crawl(urls, planned, known, blacklist, recorded, workers, refetch, stats)

        def outcome_of(position: int) -> "Outcome":
            if position in crawling.parked:
                return {"reason": "host_parked"}
            reason = planned.refused.get(position)
            return {"reason": reason} if reason else known.outcome(position)

        try:
            with outcome_writer(output, rejects, stats, allow_empty) as write:
                for position, url in enumerate(listed):
                    write(url, outcome_of(position))
        except EmptyResultError as error:
            journal.forget_run()  # or the next run, with the cause mended, would believe it
            raise EmptyResultError(f"{urls}: {error}") from None
        stats.extra["hosts"] = largest_hosts(planned, outcome_of)
        journal.finish()
    return stats


def _digest(folder: Path) -> str:
    """One for all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _open_archive(
    path: Path | None, journal: "Journal", planned: "Plan", settings: ScrapeSettings, stack: ExitStack
) -> "Archive | None":
    """The archive, and in the journal the responses that it has and no outcome is known of."""
    from corpus.scrape.archive import Archive

    if path is None:
        journal.adopt(())
        return None
    if journal.archive_end and not path.exists():
        print(f"scrape: {path} is gone; the texts of its pages are known, and are kept", file=sys.stderr)
        journal.lose_archive()
    archive = stack.enter_context(Archive(path, journal.archive_end, settings.obey_robots))
    if found := journal.adopt(archive.found):
        print(f"scrape: {found} responses in {path} are not fetched again", file=sys.stderr)
    if lacking := sum(map(journal.is_page_outside_archive, planned.positions())):
        print(f"scrape: {lacking} known pages are not in {path}: they were fetched without it", file=sys.stderr)
    return archive


def _crawl(
    urls: Path,
    planned: "Plan",
    known: "Known",
    blacklist: BlacklistSettings,
    archive: "Archive | None",
    workers: int,
    refetch: bool,
    stats: Stats,
) -> "Crawl":
    """Settle what is not known."""
    from corpus.scrape.crawl import Stopped, crawl

    def settled() -> int:
        return sum(map(known.is_settled, planned.positions()))

    total = len(planned.keys) - len(planned.refused)
    stats.extra["resumed"] = settled()
    if stats.extra["resumed"]:
        print(f"scrape: {stats.extra['resumed']} of {total} URLs are settled already", file=sys.stderr)
    try:
        run = asyncio.run(crawl(planned, known, blacklist, archive, workers, refetch=refetch))
    except BaseExceptionGroup as group:
        first = _first(group)
        if isinstance(first, OutageError):
            raise OutageError(f"{urls}: {first}") from None
        raise first from None
    except (KeyboardInterrupt, Stopped) as stop:  # Ctrl-C; SIGTERM, at a job's time limit; SIGHUP
        print(f"scrape: {settled()} of {total} URLs are settled; run it again to go on", file=sys.stderr)
        if isinstance(stop, Stopped):
            sys.exit(128 + stop.args[0])
        raise
    stats.extra["fetched"], stats.extra["extracted_again"] = run.fetched, run.extracted_again
    return run


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
    parser.add_argument(
        "--archive", type=cli.regular_file, metavar="FILE", help="raw responses (.warc.gz), added to those there"
    )
    parser.add_argument(
        "--resolve", nargs="+", action="extend", default=[], metavar="HOST=IP:PORT", help="added to scrape.resolve"
    )
    parser.add_argument(
        "--site",
        type=cli.input_path,
        metavar="DIR",
        help="recorded site behind --resolve; its pages are kept while it is the same",
    )
    parser.add_argument(
        "--refetch",
        action="store_true",
        help="fetch pages again where a changed key needs them and no archive has them",
    )
    cli.add_step_options(parser, "scrape")
    arguments = parser.parse_args(argv)
    whole = step_settings(arguments.config)
    options: dict[str, Any] = {key: getattr(arguments, key) for key in ("rejects", "workers", "allow_empty")}
    if arguments.warc:
        if arguments.archive or arguments.resolve or arguments.refetch or arguments.site:
            parser.error("--archive, --resolve, --refetch and --site are for --urls: --warc uses no network")
        from corpus.scrape.warc import extract_archives

        paths = expand_inputs(arguments.warc)
        require_regular(paths, "corpus.scrape --warc")
        extract_archives(paths, arguments.output, whole.scrape, whole.blacklist, **options).finish(arguments.stats)
        return 0
    from corpus.scrape.host_stats import table

    resolve = dict(whole.scrape.resolve)
    for entry in arguments.resolve:
        host, separator, address = entry.partition("=")
        if not separator:
            parser.error(f"--resolve {entry}: must read HOST=IP:PORT")
        resolve[host] = address
    settings = whole.scrape.model_copy(update={"resolve": resolve})
    options |= {"archive": arguments.archive, "refetch": arguments.refetch, "site": arguments.site}
    stats = scrape(arguments.urls, arguments.output, settings, whole.blacklist, **options)
    stats.finish(arguments.stats)
    print(table(stats.extra["hosts"]))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
