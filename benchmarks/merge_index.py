"""Merging datasets: ours against megatron-core's builder, and against putting the .bin files end to end.

Shards hold random ids in documents of 1 to twice the mean of tokens. A hundred are written, the others are links to
them, so that a large merge needs the disk once; every row therefore reads from memory and writes to the disk. Ours
reads the ids, checks them and both checksums, and waits for the disk, as the plain copy does; the builder does neither.
It collects Python's garbage after every shard, which is nearly all of its time, so that a row shows it without.
"""

import argparse
import os
import shutil
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import psutil

from benchmarks.machine import alone, peak_memory, table
from common.cli import output_folder, positive_int
from common.files import fsync

_DISTINCT = 100


class Run(NamedTuple):
    """What one process did."""

    seconds: float
    """Wall-clock: half of the work is the disk's."""
    peak: int
    """Largest resident memory, in bytes."""
    before: int
    """Resident memory once everything was imported."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--shards", type=positive_int, default=300, metavar="N", help="default 300")
    parser.add_argument("--large", type=positive_int, metavar="N", help="rows for so many, without the slowest")
    parser.add_argument("--documents", type=positive_int, default=1000, metavar="N", help="of a shard (default 1,000)")
    parser.add_argument(
        "--tokens", type=positive_int, default=128, metavar="N", help="mean of a document (default 128)"
    )
    parser.add_argument("--rounds", type=positive_int, default=1, metavar="N", help="runs of each row (default 1)")
    parser.add_argument(
        "--folder", type=output_folder, metavar="DIR", help="where it is written (default: a temporary folder)"
    )


def make_shards(folder: Path, shards: int, documents: int, tokens: int) -> list[Path]:
    """Their prefixes; the content depends on the numbers alone."""
    import numpy as np

    from corpus.index import IndexWriter, Meta, suffixed

    random = np.random.default_rng(1)
    prefixes = [folder / f"{number:05d}" for number in range(shards)]
    for number, prefix in enumerate(prefixes):
        if number >= _DISTINCT:
            for suffix in (".bin", ".idx", ".json"):
                os.link(suffixed(prefixes[number % _DISTINCT], suffix), suffixed(prefix, suffix))
            continue
        lengths = random.integers(1, 2 * tokens, documents)
        with IndexWriter(prefix, np.uint16, Meta(50257, 50256)) as index:
            index.add_documents(random.integers(0, 50257, lengths.sum()), lengths)
    return prefixes


def plain_copy(inputs: list[Path], output: Path) -> None:
    """The .bin files end to end, on the disk."""
    with open(f"{output}.bin", "wb") as file:
        for prefix in inputs:
            with open(f"{prefix}.bin", "rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
    fsync(Path(f"{output}.bin"))


def their_merge(inputs: list[Path], output: Path) -> None:
    """megatron-core: `add_index` for each dataset, then `finalize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    import numpy as np

    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
    for prefix in inputs:
        builder.add_index(str(prefix))
    builder.finalize(f"{output}.idx")


def their_merge_without_collecting(inputs: list[Path], output: Path) -> None:
    """The same, were it not for `gc.collect` after every dataset."""
    with patch("gc.collect"):
        their_merge(inputs, output)


def our_merge(inputs: list[Path], output: Path) -> None:
    """`corpus.merge_index`."""
    from corpus.merge_index import merge_index

    merge_index(inputs, output)


def _timed(function: Callable[[list[Path], Path], None], inputs: list[Path], output: Path) -> Run:
    function(inputs[:1], output)  # imports
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    function(inputs, output)
    seconds = time.perf_counter() - started
    return Run(seconds, peak_memory(), before)


def _alone(function: Callable[[list[Path], Path], None], inputs: list[Path], output: Path) -> Run:
    """A merge in a process of its own, so that memory is its own, too; what it wrote is removed."""
    run = alone(_timed, function, inputs, output)
    for path in output.parent.glob("out.*"):
        path.unlink()
    return run


def measure(arguments: argparse.Namespace) -> str:
    """Rows of seconds and memory."""
    functions = {"plain copy of the .bin": plain_copy, "corpus.merge_index": our_merge}
    peers = {}
    if find_spec("megatron"):
        functions["megatron-core, not collecting"] = their_merge_without_collecting
        peers["megatron-core, add_index"] = their_merge
    rows = []
    for shards, chosen in ((arguments.shards, {**functions, **peers}), (arguments.large, functions)):
        if not shards:
            continue
        with TemporaryDirectory(dir=arguments.folder) as name:
            inputs = make_shards(Path(name, "in"), shards, arguments.documents, arguments.tokens)
            size = sum(prefix.with_suffix(".bin").stat().st_size for prefix in inputs)
            runs: dict[str, list[Run]] = {label: [] for label in chosen}
            for _ in range(arguments.rounds):
                for label, function in chosen.items():
                    runs[label].append(_alone(function, inputs, Path(name, "out")))
        peer = next(iter(runs.values()))
        rows += [
            {
                "merging": label,
                "shards": f"{shards:,}",
                "documents": f"{shards * arguments.documents:,}",
                "GB": f"{size / 1e9:.1f}",
                "seconds": f"{median(run.seconds for run in results):.1f}",
                "ratio": f"{median(p.seconds / r.seconds for p, r in zip(peer, results, strict=True)):.3f}",
                "peak memory": f"{max(run.peak for run in results) / 1e6:,.0f} MB",
                "before the merge": f"{max(run.before for run in results) / 1e6:,.0f} MB",
            }
            for label, results in runs.items()
        ]
    return table(rows)
