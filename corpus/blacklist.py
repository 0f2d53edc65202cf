"""Drop URLs that are not worth fetching, and split the rest into shards.

    python -m corpus.blacklist --input urls.txt more/*.xz --output kept.txt --rejects dropped.jsonl
    python -m corpus.blacklist --input RS_2019-12.zst --output-dir urls --shards 64

Inputs are files, folders, globs or `-` (stdin), plain or .gz/.bz2/.xz/.zst: one URL per line, or
Pushshift submission dumps (JSON lines). The first reason wins: malformed, scheme, short,
private_host, domain, extension, pattern, known (to an earlier run), duplicate. URLs keep their
order. A registered domain lies in one shard, so that only one job fetches from a host. The lists in
--output-dir end with the line `# end`: corpus.scrape refuses a truncated one.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import orjson
import xxhash

from common import cli
from common.console import warn
from common.errors import InputError
from common.files import check_outputs, expand_inputs, read_blocks, removed_ids, sharded_lines
from common.settings import BlacklistSettings
from common.stats import Stats
from common.workers import Workers
from corpus.runner import Results, ShardStep, StepOptions, step_options
from corpus.urls.lists import LIST_BEGINS, LIST_ENDS
from corpus.urls.rules import SeenUrls, UrlRules
from corpus.urls.url import document_id


@dataclass
class CheckedUrls:
    """The URLs of a block of lines, in order."""

    urls: list[str] = field(default_factory=list)
    """As they will be requested; dropped URLs as given."""
    verdicts: list[int | str] = field(default_factory=list)
    """For each URL, the reason to drop it, or its shard."""
    hashes: list[int] = field(default_factory=list)
    """`hash64` of the canonical form of each kept URL."""


def check_lines(settings: BlacklistSettings, rules: UrlRules, block: bytes) -> CheckedUrls:
    """Check a block of whole lines, each a URL or a submission; skip blank ones and comments."""
    checked = CheckedUrls()
    urls, verdicts, hashes = checked.urls, checked.verdicts, checked.hashes
    digest = xxhash.xxh3_64_intdigest  # looked up once: a list has millions of lines
    # invalid UTF-8 becomes characters that no URL may contain
    for url, reason, shard, canonical in rules.judge(block.decode("utf-8", "surrogateescape").removesuffix("\n")):
        if reason == "malformed" and url[0] == "{":
            url, reason = _submission(url, settings)
            if reason is None:
                url, reason, shard, canonical = rules.judge_one(url)
        urls.append(url)
        if reason is None:
            verdicts.append(shard)
            hashes.append(digest(canonical.encode()))
        else:
            verdicts.append(reason)
            if not url.isascii():
                urls[-1] = url.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return checked


def _submission(line: str, settings: BlacklistSettings) -> tuple[str, str | None]:
    """The URL of a Pushshift submission, and a reason to drop it before the URL rules, or None."""
    try:
        entry: Any = orjson.loads(line.encode("utf-8", "surrogateescape"))
    except orjson.JSONDecodeError:
        return line, "malformed"
    url = entry.get("url") or entry.get("url_overridden_by_dest")
    if not isinstance(url, str):
        return line, "malformed"
    # the three escapes that Reddit applies to all text; `&copy=1` in a query is not an escape
    url = url.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    if url.startswith(("/r/", "/u/", "/user/")):  # a crosspost; its target is a separate submission
        url = f"https://www.reddit.com{url}"
    try:
        over_18 = _truth(entry.get("over_18"))
        is_self = _truth(entry.get("is_self"))  # if absent, `domain` drops self posts, on reddit.com
        score = _number(entry.get("score", settings.min_score))
    except ValueError:
        return url, "malformed"
    if over_18 and not settings.over_18:
        return url, "over_18"
    if is_self and not settings.self_posts:
        return url, "self_post"
    return url, "score" if score < settings.min_score else None


def _truth(value: object) -> bool:
    """A flag of a dump: a boolean, number or string. Raises ValueError for anything else."""
    text = str(value).strip().lower()
    if text in ("true", "1", "1.0", "yes", "t", "y"):
        return True
    if text in ("false", "0", "0.0", "no", "f", "n", "none", "null", ""):
        return False
    raise ValueError(f"not a flag: {text}")


def _number(value: object) -> float:
    """A score of a dump: a number or string. Raises ValueError for anything else."""
    if isinstance(value, int | float | str) and not isinstance(value, bool) and "_" not in str(value):
        number = float(value)
        if isfinite(number):
            return number
    raise ValueError(f"not a number: {value}")


@lru_cache(1)
def _rules(settings: str, shards: int) -> tuple[BlacklistSettings, UrlRules]:
    """The rules of `settings` (JSON), built once per process."""
    parsed = BlacklistSettings.model_validate_json(settings)
    return parsed, UrlRules(parsed, shards)


def _check(settings: str, shards: int, block: bytes) -> CheckedUrls:
    return check_lines(*_rules(settings, shards), block)


def blacklist(
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    settings: BlacklistSettings,
    known: Iterable[Path] = (),
    removed: Collection[str] = (),
    *,
    marked: bool = False,
    **options: Unpack[StepOptions],
) -> Stats:
    """Filter URL lists into one text file per shard, all of them or none.

    Drops the URLs in the lists `known`, and those whose ids are in `removed`. Memory is 8 bytes per
    kept and known URL. `marked` outputs show that they are whole (`corpus.urls.lists`).

    Raises EmptyResultError if no URL is left, InputError if the lists have none, or if no entry of
    a list of domains can match.
    """
    step = ShardStep("blacklist", inputs, **options | {"max_bad_share": None}, unit="URLs")
    stats, check = step.stats, partial(_check, settings.model_dump_json(), len(outputs))
    for entries in _rules(settings.model_dump_json(), len(outputs))[1].domains.lists:
        if entries.unusable:
            warn(f"{entries}")
            counts = {"entries": entries.entries, "unusable": entries.unusable, "first_unusable": entries.first}
            stats.extra.setdefault("domain_lists", {})[entries.name] = counts
    earlier, seen, marked_shards = SeenUrls(), SeenUrls(), range(len(outputs) if marked else 0)
    with Workers(step.workers) as pool:
        for checked in pool.map(check, _blocks(known)):
            earlier.add(np.array(checked.hashes, dtype=np.uint64))
        checked_blocks = pool.map(check, _blocks(step.new_files(inputs)))  # forks before outputs are open
        with sharded_lines(outputs) as write, step.results() as results:
            for shard in marked_shards:
                write(shard, f"{LIST_BEGINS}\n".encode())
            for checked in checked_blocks:
                for shard, urls in _kept(checked, earlier, seen, removed, results).items():
                    lines = "".join(f"{url}\n" for url in urls).encode()
                    write(shard, lines)
                    stats.documents_out += len(urls)
                    stats.bytes_out += len(lines) - len(urls)  # without line ends
                stats.documents_in += len(checked.urls)
                stats.bytes_in += len("".join(checked.urls).encode())
                results.meter.advance(len(checked.urls))
            for shard in marked_shards:
                write(shard, f"{LIST_ENDS}\n".encode())
            if not stats.documents_in and not step.allow_empty:
                raise InputError(f"{', '.join(map(str, inputs))}: no URLs inside; give a list with one URL per line")
    return stats


def _kept(
    checked: CheckedUrls, earlier: SeenUrls, seen: SeenUrls, removed: Collection[str], results: Results
) -> dict[int, list[str]]:
    """The URLs of a block to keep, by shard; drops the others."""
    kept = defaultdict[int, list[str]](list)
    hashes = np.array(checked.hashes, dtype=np.uint64)
    repeats = zip(earlier.holds(hashes).tolist(), seen.add(hashes).tolist(), strict=True)
    for url, verdict in zip(checked.urls, checked.verdicts, strict=True):
        if isinstance(verdict, str):
            results.drop({"url": url}, verdict)
            continue
        is_known, is_new = next(repeats)
        if removed and (name := document_id(url)) in removed:
            results.drop({"id": name}, "removed")  # without its URL
        elif is_new and not is_known:
            kept[verdict].append(url)
        else:
            results.drop({"url": url}, "known" if is_known else "duplicate")
    return kept


def _blocks(paths: Iterable[Path]) -> Iterator[bytes]:
    return (block for path in paths for block in read_blocks(path))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.blacklist", __doc__)
    cli.add_input(parser, cli.lists)
    cli.add_earlier(parser, "lists or folders of URLs to drop as `known`, such as the `urls` of an earlier run")
    cli.add_output_shards(parser, "the URLs that are kept", ".txt")
    cli.add_step_options(parser, "blacklist")
    arguments = parser.parse_args(argv)
    outputs, settings = cli.output_shards(arguments, ".txt"), cli.read_settings(arguments)
    inputs = expand_inputs(arguments.input, "lists")
    known = expand_inputs(map(str, arguments.known), "lists")
    check_outputs([*outputs, arguments.rejects, arguments.stats], [*inputs, *known])
    removed, options = removed_ids(arguments.removed), step_options(arguments, settings)
    marked = arguments.output is None
    stats = blacklist(inputs, outputs, settings.blacklist, known, removed, marked=marked, **options)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
