"""How long `training.trace` takes to answer at the size of OpenWebText: 8 million documents, 9.2 G tokens.

    python -m benchmarks.provenance --work /scratch/trace
    python -m benchmarks.provenance --work /scratch/trace --documents 100000 --queries 20

The dataset is made once: lengths, PREFIX.docs with a URL per document, 160 pages per site; its tokens are a sparse
file, because no answer reads them. The model has read 1.3 epochs in batches of 512 samples of 1,024 tokens.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common import cli
from common.config import validate, write_settings
from common.console import text_table
from common.files import write_text
from corpus.index.documents import DocumentWriter
from corpus.index.layout import CODES, DOCUMENTS, HEADER, MAGIC, suffixed
from corpus.urls.url import document_id
from training.trace import Trace

_MEAN, _PER_SITE, _BATCH, _SEQ_LEN = 1150, 160, 512, 1024
_CHUNK = 100_000  # documents


def _url(number: int) -> str:
    return f"https://www.site{number % (1 + number // _PER_SITE)}.example/page/{number}"


def make_dataset(prefix: Path, documents: int) -> int:
    """Write the dataset unless it is there; returns its tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(128, 2 * _MEAN - 128, documents).astype("<i4")
    tokens, index = int(lengths.sum(dtype=np.int64)), suffixed(prefix, ".idx")
    if index.is_file():
        return tokens
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with suffixed(prefix, DOCUMENTS).open("wb") as file, DocumentWriter(prefix.parent) as writer:
        for start in range(0, documents, _CHUNK):
            urls = [_url(number) for number in range(start, min(documents, start + _CHUNK))]
            writer.add([{"id": document_id(url), "url": url} for url in urls], f"{start // _CHUNK:04d}")
        writer.finish(file, "")
    with suffixed(prefix, ".bin").open("wb") as file:
        file.truncate(2 * tokens)
    with index.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[np.dtype("<u2")], documents, documents + 1))
        ends = np.cumsum(lengths, dtype="<i8")
        for column in (lengths, 2 * (ends - lengths), np.arange(documents + 1, dtype="<i8")):
            column.tofile(file)
    return tokens


def make_model(folder: Path, prefix: Path, tokens: int) -> None:
    """A model folder that says that the model has read 1.3 epochs of the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    iterations = int(1.3 * tokens / _SEQ_LEN / _BATCH)
    one = {
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "seq_len": _SEQ_LEN},
        "train": {"iterations": iterations, "micro_batch_size": 1, "global_batch_size": _BATCH, "split": "100,0,0"},
        "data": [{"prefix": str(prefix), "weight": 1.0}],
    }
    config = {"run": str(folder.parent.parent), "models": {folder.name: one}}
    write_settings(validate(config, "benchmarks.provenance"), folder / "settings.yaml")
    write_text(folder / "train.csv", f"iteration,consumed_samples\n{iterations},{iterations * _BATCH}\n")


def _times(query: Callable[[Any], object], asked: Sequence[Any]) -> list[float]:
    found = []
    for each in asked:
        begun = time.perf_counter()
        query(each)
        found.append(1000 * (time.perf_counter() - begun))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser("benchmarks.provenance", description=__doc__)
    parser.add_argument("--documents", type=cli.positive_int, default=8_000_000)
    parser.add_argument("--queries", type=cli.positive_int, default=50, help="of each kind")
    parser.add_argument("--work", type=Path, required=True, help="folder for the dataset, 900 MB, and the model")
    arguments = parser.parse_args(argv)
    prefix, folder = arguments.work / "dataset/corpus", arguments.work / "models/model"
    tokens = make_dataset(prefix, arguments.documents)
    make_model(folder, prefix, tokens)
    begun = time.perf_counter()
    trace = Trace(folder)
    table = trace.tables[0]
    opened = time.perf_counter() - begun
    rng = np.random.default_rng(1)
    picked = [_url(number) for number in rng.integers(0, arguments.documents, arguments.queries).tolist()]
    sites = [url.split("/")[2] for url in picked]
    trace.reads(0, table.of_url(picked[0]))
    order = time.perf_counter() - begun - opened
    steps = rng.integers(1, trace.trained, arguments.queries).tolist()
    kinds: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "URL": (lambda url: trace.reads(0, table.of_url(url)), picked),
        "domain": (lambda site: trace.reads(0, table.of_domain(site)), sites),
        "iteration": (lambda step: list(trace.step(step)), steps),
    }
    rows = []
    for kind, (query, asked) in kinds.items():
        found = _times(query, asked)
        rows.append([kind, *(f"{value:.1f}" for value in (min(found), median(found), max(found)))])
    print(f"{arguments.documents:,} documents, {tokens:,} tokens, {trace.trained:,} iterations")
    print(text_table([["query", "ms, fastest", "median", "slowest"], *rows], "lrrr"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"opening {1000 * opened:.0f} ms, the order of two epochs {order:.1f} s, peak memory {memory:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
