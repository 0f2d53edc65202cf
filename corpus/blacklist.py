"""Drop the URLs that are not worth fetching, and split the rest into shards.

    python -m corpus.blacklist --input urls.txt more/*.xz --output kept.txt --rejects dropped.jsonl
    python -m corpus.blacklist --input RS_2019-12.zst --output-dir urls --shards 64 --stats urls/stats.json

Inputs are files, folders, globs or `-` (stdin), plain or .gz/.bz2/.xz/.zst: one URL a line, or Pushshift submission
dumps (JSON lines). The first reason wins: malformed, scheme, short, private_host, domain, extension, pattern,
duplicate. The order of the input is kept. A shard holds whole registered domains, so that politeness to a host stays
inside one job.
"""

import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from common import cli
from common.config import step_settings
from common.console import warn
from common.errors import EmptyResultError, InputError
from common.files import check_outputs, expand_inputs, output_files, reject_writer, unmarked_blocks
from common.progress import Meter
from common.settings import BlacklistSettings
from common.stats import Stats
from common.workers import batched, process_map
from corpus.urls.bulk_rules import BulkUrlRules, CheckedUrls
from corpus.urls.domain_lists import DomainListReport
from corpus.urls.seen_set import SeenSet

_FLUSH = 1 << 20  # URLs held before the shards are appended to; bounds memory, whatever the number of shards
_WRITTEN = 1 << 14  # URLs made into one piece of a file, which takes their size three times over


@lru_cache(1)
def _rules(settings: str, shards: int) -> BulkUrlRules:
    """The rules of `settings` (JSON), built once a process."""
    return BulkUrlRules(BlacklistSettings.model_validate_json(settings), shards)


def _check(settings: str, shards: int, block: bytes) -> CheckedUrls:
    return _rules(settings, shards).check(block)


def blacklist(
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    settings: BlacklistSettings,
    rejects: Path | None = None,
    workers: int = 1,
) -> Stats:
    """Filter URL lists into one text file a shard, all of them or none. Remembers 8 bytes of each URL it keeps.

    Raises EmptyResultError when no URL is left, InputError when there was none to begin with, or when no entry of a
    list of domains can match.
    """
    stats, seen = Stats("blacklist"), SeenSet()
    pending: list[list[str]] = [[] for _ in outputs]
    blocks = (block for path in inputs for block in unmarked_blocks(path))
    _report_lists(_rules(settings.model_dump_json(), len(outputs)).domain_lists, stats)
    with (
        process_map(partial(_check, settings.model_dump_json(), len(outputs)), blocks, workers) as results,
        output_files(outputs) as files,
        reject_writer(rejects, "blacklist") as reject,
        Meter("blacklist", "URLs") as meter,
    ):

        def flush() -> None:
            for file, urls in zip(files, pending, strict=True):
                for batch in batched(urls, _WRITTEN):
                    data = "".join(f"{url}\n" for url in batch).encode()
                    file.append(data)
                    stats.bytes_out += len(data) - len(batch)  # without line ends
                urls.clear()

        for checked in results:
            new = iter(seen.add(np.array(checked.hashes, dtype=np.uint64)).tolist())
            for url, verdict in zip(checked.urls, checked.verdicts, strict=True):
                if isinstance(verdict, int) and next(new):
                    pending[verdict].append(url)
                else:
                    reason = "duplicate" if isinstance(verdict, int) else verdict
                    stats.reasons[reason] += 1
                    reject({"url": url, "reason": reason})
            stats.documents_in += len(checked.urls)
            stats.bytes_in += len("".join(checked.urls).encode())
            meter.advance(len(checked.urls))
            if sum(map(len, pending)) >= _FLUSH:
                flush()
        flush()
        stats.documents_out = stats.documents_in - stats.reasons.total()
        names = ", ".join(map(str, inputs))
        if not stats.documents_in:
            raise InputError(f"{names}: no URLs inside; give a list with one URL a line")
        if not stats.documents_out:
            raise EmptyResultError(f"{names}: none of {stats.documents_in} URLs is left ({stats.dropped()})")
    return stats


def _report_lists(lists: Sequence[DomainListReport], stats: Stats) -> None:
    """Say which lists of domains hold entries that can never match, here and in the statistics."""
    for entries in lists:
        if entries.unusable:
            warn(f"{entries}")
            stats.extra.setdefault("domain_lists", {})[entries.name] = {
                "entries": entries.entries,
                "unusable": entries.unusable,
                "first_unusable": entries.first,
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.blacklist", __doc__)
    parser.add_argument("--input", type=cli.lists, nargs="+", required=True, metavar="PATH", help="URL lists")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=cli.output_file, metavar="FILE", help="the URLs that are kept")
    output.add_argument(
        "--output-dir", type=cli.output_folder, metavar="DIR", help="folder for the shards 0000.txt, 0001.txt, …"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="number of shards in --output-dir")
    parser.add_argument(
        "--rejects", type=cli.output_file, metavar="FILE", help="dropped URLs with their reasons (JSON lines)"
    )
    parser.add_argument("--stats", type=cli.output_file, metavar="FILE")
    parser.add_argument("--min-score", type=int, metavar="N", help="Pushshift dumps: skip submissions below (3)")
    parser.add_argument("--over-18", action="store_true", default=None, help="Pushshift dumps: take these, too")
    parser.add_argument("--self-posts", action="store_true", default=None, help="Pushshift dumps: take these, too")
    parser.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--config", type=cli.input_path, metavar="FILE", help="read the section `blacklist`")
    arguments = parser.parse_args(argv)
    if (arguments.output_dir is None) != (arguments.shards is None):
        parser.error("--output-dir and --shards belong together")
    if arguments.shards is not None and arguments.shards < 1:
        parser.error("--shards must be at least 1")
    given = {key: getattr(arguments, key) for key in ("min_score", "over_18", "self_posts")}
    given = {key: value for key, value in given.items() if value is not None}
    settings = step_settings(arguments.config).blacklist.model_copy(update=given)
    outputs = (
        [arguments.output]
        if arguments.output
        else [arguments.output_dir / f"{shard:04d}.txt" for shard in range(arguments.shards)]
    )
    inputs = expand_inputs(arguments.input, "lists")
    check_outputs([*outputs, arguments.rejects, arguments.stats], inputs)
    stats = blacklist(inputs, outputs, settings, arguments.rejects, arguments.workers)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
