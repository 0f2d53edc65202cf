"""Fetch the pages of a URL list politely, extract their text, and write them in the list's order.

    python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --config config.yaml
    python -m corpus.scrape --urls urls.txt --output p.jsonl 'scrape.resolve={"*": 127.0.0.1:8080}'
    python -m corpus.scrape --warc raw.warc.gz CC-MAIN-*.warc.gz --output pages.jsonl.zst

The outcome of each URL is kept beside the output (OUTPUT.journal), for this list and later ones: an
interrupted run resumes, and a finished one fetches only new URLs. When a changed key needs pages
again (extractors, a larger max_bytes), they come from the archive. If the archive lacks them, the
run stops and says what it would fetch again; --refetch, or deleting OUTPUT.settings.json, consents.
Two runs over the same pages write the same bytes. If no host answers at all, nothing is recorded
and the exit code is 75, even with --allow-empty.

Public hosts are only contacted if scrape.contact is set. Pages of WARC files (our own or Common
Crawl's; files, folders or globs) become records by the same rules, without a network.
"""

import asyncio
import hashlib
import sys
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

from common import cli
from common.console import note
from common.errors import EmptyResultError, OutageError
from common.files import expand_inputs, require_regular
from common.settings import BlacklistSettings, ScrapeSettings
from common.stats import Stats
from corpus.runner import ShardStep, StepOptions, step_options
from corpus.scrape.archive import Archive, write_records
from corpus.scrape.crawl import Crawl, CrawlQueues, crawl, require_contact, sort_into_queues
from corpus.scrape.journal import Journal
from corpus.scrape.offline import extract_archives
from corpus.scrape.outcome_cache import OutcomeCache, outcome_settings
from corpus.scrape.pages import Outcome, largest_hosts, outcome_writer
from corpus.urls.lists import read_urls
from corpus.urls.rules import UrlRules


def scrape(
    urls: Path,
    output: Path,
    settings: ScrapeSettings,
    blacklist: BlacklistSettings,
    *,
    archive: Path | None = None,
    refetch: bool = False,
    site: Path | None = None,
    **options: Unpack[StepOptions],
) -> Stats:
    """Scrape the list `urls` into the shard `output`, reusing the outcomes of earlier runs.

    `refetch` allows fetching pages again that changed settings need and the archive lacks. `site`
    is the folder of a recorded site that is served instead of the web; if it changes, earlier
    outcomes do not count. Raises EmptyResultError if no page has text, OutageError if the network
    is down, ConfigError if pages would have to be fetched again without `refetch`.
    """
    listed = read_urls(urls, options.get("allow_empty", False))
    rules = UrlRules(blacklist)
    queues = sort_into_queues(listed, rules)
    step = ShardStep("scrape", **options | {"max_bad_share": None}, unit="URLs")
    stats = step.stats
    libraries = ("trafilatura", "newspaper3k", "resiliparse", "lxml", "turbohtml")
    stats.extra["libraries"] = {name: version(name) for name in libraries}
    today = outcome_settings(settings) | ({"site": _digest(site)} if site else {})
    with Journal(output, today) as journal, Archive(archive) if archive else nullcontext() as opened:
        cache = OutcomeCache(journal, queues.keys, settings, rules, opened)
        if opened:
            if opened.torn_bytes:
                left = sum(not cache.is_done(each) and not cache.in_archive(each) for each in queues.positions())
                cut = f"cut off {opened.torn_bytes:,} torn bytes after its last complete record"
                note(f"{archive}: {cut}; {left} pages are fetched, lost ones again")
            if unknown := opened.responses.keys() - journal.known:
                note(f"{len(unknown)} responses in {archive} are not fetched again")
            if lacking := cache.pages_outside_archive(queues.positions()):
                note(f"{lacking} known pages are not in {archive}: fetched without it, or lost by it")
        require_contact(queues, cache)
        cache.confirm_refetch(queues.positions(), refetch)
        total, done = len(queues.keys) - len(queues.refused), _count_done(queues, cache)
        if done:
            note(f"{done} of {total} URLs are done already")
        try:
            run = _run(crawl(queues, cache, rules, step.workers), urls)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, at a job's time limit; SIGHUP
            note(f"{_count_done(queues, cache)} of {total} URLs are done; run it again to resume")
            raise
        stats.extra |= {"resumed": done, "fetched": run.fetched, "extracted_again": run.extracted_again}

        def outcome_of(position: int) -> Outcome:
            if position in run.parked:
                return {"reason": "host_parked"}
            reason = queues.refused.get(position)
            return {"reason": reason} if reason else cache.outcome(position)

        try:
            with outcome_writer(output, step) as write:
                for position, url in enumerate(listed):
                    write(url, outcome_of(position))
        except EmptyResultError as error:
            journal.forget_run()  # once the cause is fixed, the next run must try again
            raise EmptyResultError(f"{urls}: {error}") from None
        if opened and opened.path.is_file():
            write_records(opened.path, opened.responses)
        stats.extra["hosts"] = largest_hosts(queues.queues, outcome_of)
    return stats


def _digest(folder: Path) -> str:
    """A hash of all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _count_done(queues: CrawlQueues, cache: OutcomeCache) -> int:
    return sum(map(cache.is_done, queues.positions()))


def _run(crawling: Coroutine[Any, Any, Crawl], urls: Path) -> Crawl:
    """Run a crawl. Raises the first error of its tasks; the others were cancelled."""
    try:
        return asyncio.run(crawling)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise (OutageError(f"{urls}: {error}") if isinstance(error, OutageError) else error) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.scrape", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--urls", type=cli.input_path, metavar="FILE", help="one URL per line")
    source.add_argument(
        "--warc", type=cli.any_files, nargs="+", metavar="PATH", help="WARC files to extract, instead of fetching"
    )
    parser.add_argument("--output", type=cli.output_file, required=True, metavar="FILE", help="pages (.jsonl.zst)")
    parser.add_argument(
        "--archive", type=cli.output_file, metavar="FILE", help="raw responses (.warc.gz), appended to an existing file"
    )
    parser.add_argument(
        "--site",
        type=cli.input_path,
        metavar="DIR",
        help="recorded site that scrape.resolve leads to; earlier outcomes count while it is unchanged",
    )
    parser.add_argument(
        "--refetch", action="store_true", help="fetch pages again that a changed key needs and the archive lacks"
    )
    cli.add_step_options(parser, "scrape")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    given, options = (arguments.output, settings.scrape, settings.blacklist), step_options(arguments, settings)
    online = {"archive": arguments.archive, "refetch": arguments.refetch, "site": arguments.site}
    if arguments.warc:
        if any(online.values()):
            parser.error("--archive, --refetch and --site are for --urls: --warc uses no network")
        paths = expand_inputs(arguments.warc)
        require_regular(paths, "corpus.scrape --warc")
        stats = extract_archives(paths, *given, **options)
    else:
        stats = scrape(arguments.urls, *given, **online, **options)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
