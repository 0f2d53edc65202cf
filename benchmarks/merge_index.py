"""Merging datasets: ours against megatron-core's builder, and against concatenating the .bin files.

Shards hold random ids in documents of 1 to twice the mean number of tokens. A hundred are written, the others are hard
links to them, so that every row reads from memory and writes to disk. Ours checks the ids and both checksums, and like
the plain copy waits for the disk; the builder does neither. It runs Python's garbage collector after every shard, which
takes nearly all of its time, so another row measures it without.
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
    """The figures of one process."""

    seconds: float
    """Wall-clock time, because half of the work is the disk's."""
    peak: int
    """Peak resident memory, in bytes."""
    before: int
    """Resident memory after all imports, in bytes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--shards", type=positive_int, default=300, metavar="N", help="default 300")
    parser.add_argument(
        "--large", type=positive_int, metavar="N", help="more rows for N shards, without the slowest contender"
    )
    parser.add_argument(
        "--documents", type=positive_int, default=1000, metavar="N", help="documents per shard (default 1,000)"
    )
    parser.add_argument(
        "--tokens", type=positive_int, default=128, metavar="N", help="mean length of a document (default 128)"
    )
    parser.add_argument("--rounds", type=positive_int, default=1, metavar="N", help="rounds per row (default 1)")
    parser.add_argument(
        "--folder", type=output_folder, metavar="DIR", help="where to write (default: a temporary folder)"
    )


def make_shards(folder: Path, shards: int, documents: int, tokens: int) -> list[Path]:
    """Write shards that depend only on these numbers. Returns their prefixes."""
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
    """Concatenate the .bin files, and wait for the disk."""
    with open(f"{output}.bin", "wb") as file:
        for prefix in inputs:
            with open(f"{prefix}.bin", "rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
    fsync(Path(f"{output}.bin"))


def their_merge(inputs: list[Path], output: Path) -> None:
    """megatron-core: `add_index` per dataset, then `finalize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    import numpy as np

    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
    for prefix in inputs:
        builder.add_index(str(prefix))
    builder.finalize(f"{output}.idx")


def their_merge_without_collecting(inputs: list[Path], output: Path) -> None:
    """The same without `gc.collect` after every dataset."""
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
    """Run a merge in a fresh process, so that its memory can be measured; removes its output."""
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
