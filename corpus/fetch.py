"""Fetch sources that are URLs into the run, where a machine has a network.

    python -m corpus.fetch --config config.yaml            # list what is not listed, fetch the rest
    python -m corpus.fetch --config config.yaml --list     # only list, and say how much it is
    python -m corpus.fetch --config config.yaml --renew    # list again; keeps files that are equal
    python -m corpus.fetch --input hf://datasets/OWNER/NAME/data/ --output-dir texts

Each source is listed once: RUN/fetch/KEY.json fixes names, sizes and checksums, and a file that has
changed since is refused. Files are fetched in parallel, resumed and verified, and lie below
RUN/fetch/KEY as other steps read them. Credentials are those of each store's library: HF_TOKEN,
AWS_PROFILE and the like, ~/.netrc.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from glob import escape
from pathlib import Path

from common import cli
from common.config import validate
from common.console import say
from common.errors import InputError
from common.files import document_writer, open_locked, write_json
from common.page import size as amount
from common.progress import Meter
from common.settings import CorpusSettings, SourceSettings
from corpus.ingest import read_pages, read_sources
from corpus.remote import listing as listings
from corpus.remote.download import Downloader
from corpus.remote.listing import Listing
from corpus.remote.stores import open_store
from corpus.runner import Drop, ShardStep, grouped

_USED = {"fetch", "scrape", "blacklist", "max_bad_share"}  # settings
Pairs = Sequence[tuple[SourceSettings, Listing]]


def list_all(settings: CorpusSettings, folder: Path, renew: bool) -> Pairs:
    """Each remote source with its listing, which is made if there is none, or to `renew` it.

    Files that runs of `base` have fetched are left out. Raises ToolkitError.
    """
    base, pairs = [run / folder.name for run in settings.base], []
    for source in settings.remote_sources:
        listing = old = listings.read_listing(folder, source)
        if listing is None or renew:
            listing = listings.without(base, listings.list_source(source, settings))
            say(f"{source.path}: {listings.write_listing(folder, source, old, listing)}")
        pairs.append((source, listing))
    return pairs


def fetch(pairs: Pairs, folder: Path, settings: CorpusSettings) -> None:
    """Fetch what the folder lacks of the files in listings. Raises ToolkitError."""
    missing = [(source, listing, listing.missing(folder, source)) for source, listing in pairs]
    sizes = [file.size for *_, files in missing for file in files]
    kept = sum(file.size or 0 for source, _, files in missing for file in files if source.keep)
    if kept > (free := shutil.disk_usage(folder).free):
        cure = "free some, set `keep: false` where files are larger than their text, or name fewer"
        raise InputError(f"{folder}: {amount(kept)} to fetch, and {amount(free)} are free; {cure}")
    total = 0 if None in sizes else sum(size or 0 for size in sizes)
    with Meter("fetch", "files", len(sizes), size=total) as meter:
        for source, listing, files in (each for each in missing if each[2]):
            downloader = Downloader(*open_store(source, listing.root, settings), listing, settings, meter)
            origin = listings.origin_in(folder, [(source, listing)])
            for group in grouped(files, lambda _: 1, len(files) if source.keep else settings.fetch.concurrency):
                downloader.fetch(group, folder / source.key)
                for file in () if source.keep else group:
                    keep_text(folder / source.key / file.name, source, origin, settings)
    for source, listing in pairs:
        for file in listing.wanted:  # a killed fetch, or another `keep`, has left both
            listings.local(folder, source, file.name, not source.keep).unlink(missing_ok=True)


def keep_text(path: Path, source: SourceSettings, origin: Callable[[str], str], settings: CorpusSettings) -> None:
    """Replace a file by its documents, and what its reader drops, for `ingest` to read later."""
    step = ShardStep("ingest", [path], max_bad_share=settings.max_bad_share)
    pages = partial(read_pages, settings.scrape, settings.blacklist, settings.fetch.concurrency, step.stats)
    here = source.model_copy(update={"path": escape(str(path)), "glob": []})
    with document_writer(path.with_name(path.name + listings.PIECE)) as write:
        for outcome in read_sources([here], step, pages, origin=origin):
            if isinstance(outcome, Drop):
                write(outcome.document | {"reason": outcome.reason, "detail": outcome.detail})
            else:
                write(outcome)
        step.bad.check()
    path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.fetch", __doc__)
    parser.add_argument("--input", nargs="+", metavar="URL", help="instead of the `sources` of the configuration")
    parser.add_argument("--output-dir", type=cli.output_folder, metavar="DIR", help="instead of RUN/fetch")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="list what is not listed, and fetch nothing")
    action.add_argument("--renew", action="store_true", help="list all again, also what is listed")
    cli.add_stats(parser)
    cli.add_settings(parser, "fetch")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if arguments.input:
        sources = [{"path": url} for url in arguments.input]
        settings = validate({"run": settings.run, "sources": sources, **settings.model_dump(include=_USED)}, "--input")
    for path in (each for each in arguments.input or () if "://" not in each):
        raise InputError(f"--input: {path}: not a URL: hf://, s3:// or https://")
    if not settings.remote_sources or (arguments.config or arguments.output_dir) is None:
        raise InputError("name URLs with --input and --output-dir, or a --config with URLs under `sources`")
    listings.check_extras(settings)
    folder, started = arguments.output_dir or settings.fetch_folder, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with open_locked(folder / ".lock", f"{folder}: another process is fetching; stop that one, or wait for it"):
        pairs = list_all(settings, folder, arguments.renew)
        for line in filter(None, (listings.describe(folder, *pair) for pair in pairs)):
            say(line)
        if arguments.list:
            return 0
        fetch(pairs, folder, settings)
    sizes = [file.size or 0 for _, listing in pairs for file in listing.wanted]
    seconds = round(time.monotonic() - started, 3)
    if arguments.stats:
        write_json(arguments.stats, {"step": "fetch", "files": len(sizes), "bytes": sum(sizes), "seconds": seconds})
    say(f"fetch: {len(sizes):,} files, {amount(sum(sizes))}, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
