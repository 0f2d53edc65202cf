"""URL rules: our step against the published recipe, on URLs generated with a fixed seed from real host names.

The recipe (Megatron-LM's openwebtext tools, 2019) checks every URL with tldextract, a pattern for well-formed URLs, 66
file extensions, and a set of seen URLs. Both read a list and write the URLs that they keep, each in its own process.
"""

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.machine import alone, peak_memory, table
from common.cli import positive_int
from common.files import shard_paths
from common.settings import BlacklistSettings

Run = tuple[int, float, int]
"""URLs kept, CPU seconds, peak memory in bytes."""

_WORDS = (
    "the of and to in for on with as by at from how why what new world first last day year city state war people life "
    "home water school music study report house power market health science climate police court game team season"
).split()
_TLDS = "com com com org net co.uk de fr ca com.au io edu ru info".split()
_ENDINGS = (*[""] * 12, "/", "/", "/", "/", ".html", ".html", ".htm", ".php", ".aspx", ".jpg", ".gif", ".png", ".pdf")
_QUERIES = (
    *[""] * 30,
    "?id={}",
    "?p={}",
    "?page={}&ref=home",
    "?utm_source=feed&utm_medium=rss&id={}",
    "?q=%C3%A9t%C3%A9+{}",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--count", type=positive_int, default=1_000_000, metavar="N", help="URLs (default 1,000,000)")
    parser.add_argument(
        "--large", type=positive_int, metavar="N", help="add a row for a list of N URLs (10000000, say)"
    )
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="runs of each row (default 3)")


def make_urls(count: int) -> Iterator[str]:
    """Realistic URLs: half on a few hundred busy hosts, half over a long tail of hosts; the same in every run."""
    chance = random.Random(1)
    text = (Path(__file__).parent / "hosts.txt").read_text(encoding="utf-8")
    busy = [host for line in text.splitlines() if not line.startswith("#") for host in line.split()]
    weights = list(
        accumulate(1 / rank for rank in range(1, len(busy) + 1))
    )  # Zipf: the second host has half as many as the first
    earlier: list[str] = []
    for _ in range(count):
        number = chance.randrange(1_000_000)
        if earlier and number % 20 == 0:  # a duplicate of an earlier link
            yield chance.choice(earlier)
            continue
        if number % 2:
            (host,) = chance.choices(busy, cum_weights=weights)
        else:
            rare = int(250_000 * chance.random() ** 5)  # at a million URLs, one in eight has a new host
            name = f"{_WORDS[rare % 43]}{_WORDS[rare % 41]}{rare}"
            host = f"{('www.', 'www.', 'blog.', '')[rare % 4]}{name}.{_TLDS[rare % len(_TLDS)]}"
        slug = "-".join(chance.choices(_WORDS, k=chance.randrange(2, 9)))
        day = f"/{2005 + number % 15}/{1 + number % 12:02d}" if number % 3 else f"/{chance.choice(_WORDS)}"
        url = f"http{'s' * (number % 3 == 0)}://{host}{day}/{slug}{chance.choice(_ENDINGS)}"
        url += chance.choice(_QUERIES).format(number) + ("#comments" if number % 50 == 0 else "")
        if len(earlier) < 10_000:
            earlier.append(url)
        else:
            earlier[number % 10_000] = url
        yield url


def recipe(source: Path, target: Path) -> int:
    """The published recipe, rewritten from its description without its bugs (set order, concatenated extensions)."""
    import tldextract

    from corpus.urls.url import read_list

    data = Path(__file__).parent.parent / "corpus" / "urls" / "data"
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    domains, endings = set(read_list(data / "domains.txt")), tuple(read_list(data / "extensions.txt"))
    well_formed = re.compile(
        r"(?:http|ftp)s?://"
        r"(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+(?:[A-Z]{2,6}\.?|[A-Z0-9-]{2,}\.?)|localhost|\d{1,3}(?:\.\d{1,3}){3})"
        r"(?::\d+)?(?:/?|[/?]\S+)",
        re.IGNORECASE,
    )
    seen: set[str] = set()
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as kept:
        for line in lines:
            url = line.strip()
            if extract(url).domain in domains or url.split("?")[0].lower().endswith(endings):
                continue
            if len(url) <= 8 or not well_formed.fullmatch(url) or url in seen:
                continue
            seen.add(url)
            kept.write(f"{url}\n")
    return len(seen)


def ours(source: Path, target: Path, shards: int) -> int:
    """`corpus.blacklist` into one file, or into a folder of shards."""
    from corpus.blacklist import blacklist

    outputs = [target] if shards == 1 else shard_paths(target, shards, ".txt")
    return blacklist([source], outputs, BlacklistSettings()).documents_out


def _timed(function: Callable[..., int], source: Path, target: Path, *rest: object) -> Run:
    one = source.with_name("one.txt")  # import modules and read lists before timing
    one.write_text("http://example.org/\n", encoding="utf-8")
    function(one, target, *rest)
    started = time.process_time()
    kept = function(source, target, *rest)
    seconds = time.process_time() - started
    return kept, seconds, peak_memory()


def measure(arguments: argparse.Namespace) -> str:
    """URLs per CPU second; ratios compare consecutive runs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        lists = {count: folder / f"{count}.txt" for count in filter(None, (arguments.count, arguments.large))}
        for count, path in lists.items():
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{url}\n" for url in make_urls(count))
        small = lists[arguments.count]
        runs: dict[str, list[Run]] = {}
        for turn in range(arguments.rounds):
            for label, run in (
                ("published recipe", alone(_timed, recipe, small, folder / "recipe.txt")),
                ("corpus.blacklist", alone(_timed, ours, small, folder / "ours.txt", 1)),
                ("corpus.blacklist, 1,000 shards", alone(_timed, ours, small, folder / f"shards{turn}", 1000)),
            ):
                runs.setdefault(label, []).append(run)
        counts = dict.fromkeys(runs, arguments.count)
        if arguments.large:
            label = f"corpus.blacklist, {arguments.large:,} URLs, 1,000 shards"
            runs[label] = [alone(_timed, ours, lists[arguments.large], folder / "large", 1000)]
            counts[label] = arguments.large
    peer = [seconds for _, seconds, _ in runs["published recipe"]]
    rows = []
    for label, results in runs.items():
        seconds = median(result[1] for result in results)
        ratio = median(p / s[1] for p, s in zip(peer, results, strict=False)) * counts[label] / arguments.count
        rows.append(
            {
                "URL rules": label,
                "URLs": f"{counts[label]:,}",
                "kept": f"{results[0][0]:,}",
                "URLs/s, one core": f"{counts[label] / seconds:,.0f}",
                "ratio": f"{ratio:.2f}",
                "peak memory": f"{max(result[2] for result in results) / 1e6:,.0f} MB",
            }
        )
    return table(rows)
