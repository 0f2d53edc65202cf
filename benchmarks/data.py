"""Computing the order of an epoch: ours against megatron-core's (its C++ helper and shuffles); and reading samples.

Both orders start from a PREFIX on disk and end when the first sample can be read. The dataset has the size of
OpenWebText, 8 million documents of 128 to 2,171 tokens; its .bin is a sparse file, so that only the order is measured.
Samples are read from a file of 2 GiB, first outside the page cache, then inside it; the peer is a slice of a plain
memory map at random positions, without document boundaries or any check.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.machine import alone, peak_memory, table
from common.cli import positive_int
from corpus.index.layout import HEADER, MAGIC

_SEQ_LEN = 1024
_READ = 4_000  # samples read per row


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--documents", type=positive_int, default=8_000_000, metavar="N", help="default 8,000,000")
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="rounds; the best one counts (default 3)"
    )
    parser.add_argument(
        "--file", type=positive_int, default=2048, metavar="MB", help="size of the file to read from (default 2,048)"
    )


def write_dataset(prefix: Path, documents: int) -> None:
    """Write PREFIX.idx with that many documents, and a sparse PREFIX.bin."""
    lengths = np.random.RandomState(0).randint(128, 2172, size=documents).astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(2 * lengths.astype(np.int64))])
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in (lengths, pointers[:-1].astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            file.write(part.tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(pointers[-1]))


def ours(prefix: Path) -> dict[str, float]:
    """Open the corpus, compute the order of its first epoch, and read a sample."""
    from training.dataset.corpus import Corpus, Samples

    started = time.perf_counter()
    corpus = Corpus.open(prefix)
    opened = time.perf_counter()
    samples = Samples(corpus, range(corpus.documents), _SEQ_LEN, seed=1)
    samples.sample(0)
    ready = time.perf_counter()
    memory = peak_memory()
    return {"open": opened - started, "order": ready - opened, "memory": memory}


def megatron(prefix: Path) -> dict[str, float]:
    """The work of megatron-core's GPTDataset for one epoch, without its cache on disk."""
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
    from megatron.core.datasets.helpers import build_sample_idx
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    started = time.perf_counter()
    dataset = IndexedDataset(str(prefix))
    sizes = dataset.sequence_lengths
    opened = time.perf_counter()
    random = np.random.RandomState(1)
    documents = np.arange(len(sizes), dtype=np.int32)
    order = _build_document_index(documents, 1, random, False)
    tokens = int(sizes.sum(dtype=np.int64))
    samples = build_sample_idx(sizes, order, _SEQ_LEN, 1, tokens, True, True)
    _build_shuffle_index(len(samples) - 1, len(samples) - 1, random)
    ready = time.perf_counter()
    memory = peak_memory()
    return {"open": opened - started, "order": ready - opened, "memory": memory}


def _memory_of_imports(function: Callable[[Path], dict[str, float]], folder: Path) -> float:
    """Peak memory of the same work on a few documents, in bytes: that of the libraries."""
    write_dataset(folder / "small", 50)
    return alone(function, folder / "small")["memory"]


def plain_map(prefix: Path) -> Callable[[int], object]:
    """Samples as slices of a memory map at random positions."""
    tokens = np.memmap(prefix.with_suffix(".bin"), mode="r", dtype="<u2")
    starts = np.random.RandomState(1).randint(0, len(tokens) - _SEQ_LEN, _READ)
    return lambda number: tokens[starts[number] : starts[number] + _SEQ_LEN + 1].astype(np.int64)


def our_samples(prefix: Path) -> Callable[[int], object]:
    """Samples of a shuffled epoch."""
    from training.dataset.corpus import Corpus, Samples

    corpus = Corpus.open(prefix)
    samples = Samples(corpus, range(corpus.documents), _SEQ_LEN, seed=1)
    samples.sample(0)
    return samples.sample


def reading(prefix: Path) -> list[dict[str, str]]:
    """Rows of tokens per second."""
    from common.workers import threaded_map

    rows = []
    for state in ("cold", "warm"):
        first = 0.0
        for label, make, threads in (
            ("slices of a memory map", plain_map, 1),
            ("training.dataset, 1 thread", our_samples, 1),
            ("training.dataset, 2 threads", our_samples, 2),
        ):
            sample = make(prefix)
            with prefix.with_suffix(".bin").open("rb") as file:
                if state == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 24):
                        pass
            started = time.perf_counter()
            for _ in threaded_map(sample, range(_READ), threads, in_flight=64):
                pass
            rate = _READ * _SEQ_LEN / (time.perf_counter() - started)
            first = first or rate
            rows.append(
                {"reading": label, "file": state, "M tokens/s": f"{rate / 1e6:.2f}", "ratio": f"{rate / first:.2f}"}
            )
            del sample  # mapped pages stay in the page cache
    return rows


def measure(arguments: argparse.Namespace) -> str:
    """Tables of seconds and megabytes per epoch, and of tokens per second."""
    from importlib.util import find_spec

    peers = {"megatron-core": megatron} if find_spec("megatron") else {}
    rows, first = [], 0.0
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "corpus", arguments.documents)
        for label, function in {**peers, "training.dataset": ours}.items():
            runs = [alone(function, folder / "corpus") for _ in range(arguments.rounds)]
            best = min(runs, key=lambda run: run["open"] + run["order"])
            seconds = best["open"] + best["order"]
            first = first or seconds
            rows.append(
                {
                    "order of an epoch": label,
                    "documents": f"{arguments.documents:,}",
                    "open, s": f"{best['open']:.2f}",
                    "order, s": f"{best['order']:.2f}",
                    "ratio": f"{first / seconds:.2f}",
                    "memory, MB": f"{(best['memory'] - _memory_of_imports(function, folder)) / 1e6:,.0f}",
                }
            )
        random = np.random.RandomState(1).randint(0, 50257, 1 << 19).astype("<u2").tobytes()
        write_dataset(folder / "full", 456 * arguments.file)  # documents of 2.3 kB
        size = (folder / "full.bin").stat().st_size
        with (folder / "full.bin").open("wb") as file:
            for start in range(0, size, len(random)):
                file.write(random[: size - start])
            file.flush()
            os.fsync(file.fileno())
        return f"{table(rows)}\n\n{table(reading(folder / 'full'))}"
