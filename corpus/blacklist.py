"""Drop URLs that are not worth fetching, and split the rest into shards.

    python -m corpus.blacklist --input urls.txt more/*.xz --output kept.txt --rejects dropped.jsonl
    python -m corpus.blacklist --input RS_2019-12.zst --output-dir urls --shards 64 --stats urls/stats.json

Inputs are files, folders, globs or `-` (stdin), plain or .gz/.bz2/.xz/.zst: one URL per line, or Pushshift submission
dumps (JSON lines). The first reason wins: malformed, scheme, short, private_host, domain, extension, pattern,
duplicate. URLs keep their order. A registered domain lies in one shard, so that only one job fetches from a host.
"""

import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from common import cli
from common.console import warn
from common.errors import InputError
from common.files import check_outputs, expand_inputs, output_files, unmarked_blocks
from common.settings import BlacklistSettings
from common.stats import Stats
from common.workers import batched, process_map
from corpus.runner import Step
from corpus.urls.bulk_rules import BulkUrlRules, CheckedUrls
from corpus.urls.domain_lists import DomainListReport
from corpus.urls.seen_set import SeenSet

_FLUSH = 1 << 20  # URLs held before they are appended to their shards; bounds memory for any number of shards
_WRITTEN = 1 << 14  # URLs encoded and written at once, which takes three times their size


@lru_cache(1)
def _rules(settings: str, shards: int) -> BulkUrlRules:
    """The rules of `settings` (JSON), built once per process."""
    return BulkUrlRules(BlacklistSettings.model_validate_json(settings), shards)


def _check(settings: str, shards: int, block: bytes) -> CheckedUrls:
    return _rules(settings, shards).check(block)


def blacklist(
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    settings: BlacklistSettings,
    rejects: Path | None = None,
    workers: int = 1,
    allow_empty: bool = False,
) -> Stats:
    """Filter URL lists into one text file per shard, all of them or none. Remembers 8 bytes per URL that it keeps.

    Raises EmptyResultError when no URL is left, InputError when the lists hold none, or when no entry of a list of
    domains can match.
    """
    step, seen = Step("blacklist", inputs, rejects, allow_empty=allow_empty, unit="URLs"), SeenSet()
    stats = step.stats
    pending: list[list[str]] = [[] for _ in outputs]
    blocks = (block for path in step.noted(inputs) for block in unmarked_blocks(path))
    _report_lists(_rules(settings.model_dump_json(), len(outputs)).domain_lists, stats)
    with (
        process_map(partial(_check, settings.model_dump_json(), len(outputs)), blocks, workers) as blocks_checked,
        output_files(outputs) as files,
        step.results() as results,
    ):
        drop = results.drop  # looked up once: a list has millions of URLs

        def flush() -> None:
            for file, urls in zip(files, pending, strict=True):
                for batch in batched(urls, _WRITTEN):
                    data = "".join(f"{url}\n" for url in batch).encode()
                    file.append(data)
                    stats.bytes_out += len(data) - len(batch)  # without line ends
                urls.clear()

        for checked in blocks_checked:
            new = iter(seen.add(np.array(checked.hashes, dtype=np.uint64)).tolist())
            for url, verdict in zip(checked.urls, checked.verdicts, strict=True):
                if isinstance(verdict, int) and next(new):
                    pending[verdict].append(url)
                else:
                    drop({"url": url}, "duplicate" if isinstance(verdict, int) else verdict)
            stats.documents_in += len(checked.urls)
            stats.bytes_in += len("".join(checked.urls).encode())
            results.meter.advance(len(checked.urls))
            if sum(map(len, pending)) >= _FLUSH:
                flush()
        flush()
        stats.documents_out = stats.documents_in - stats.reasons.total()
        if not stats.documents_in and not allow_empty:
            raise InputError(f"{', '.join(map(str, inputs))}: no URLs inside; give a list with one URL per line")
    return stats


def _report_lists(lists: Sequence[DomainListReport], stats: Stats) -> None:
    """Warn of entries in lists of domains that can never match, and count them in the statistics."""
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
    cli.add_input(parser, cli.lists)
    cli.add_output_shards(parser, "the URLs that are kept", ".txt")
    cli.add_step_options(parser, "blacklist")
    cli.add_key_flag(parser, "--min-score", "blacklist.min_score", type=int, metavar="N")
    cli.add_key_flag(parser, "--over-18", "blacklist.over_18", nargs=0)
    cli.add_key_flag(parser, "--self-posts", "blacklist.self_posts", nargs=0)
    arguments = parser.parse_args(argv)
    outputs = cli.output_shards(arguments, ".txt")
    settings = cli.read_settings(arguments).blacklist
    inputs = expand_inputs(arguments.input, "lists")
    check_outputs([*outputs, arguments.rejects, arguments.stats], inputs)
    stats = blacklist(inputs, outputs, settings, arguments.rejects, arguments.workers, arguments.allow_empty)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
