"""One worker against two: whole commands over many small and over few large shards, and what a worker costs.

Each row runs both in turn; the ratio by the clock is the median of the rounds' own ratios, below 1 where two workers
take less time. Two cores that other work uses give no gain by the clock: CPU time (user and system, workers included)
then says what the second worker costs. Documents are those of `dedup`: real sentences, one document in five a copy.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import orjson

from benchmarks.dedup import make_documents
from benchmarks.machine import table
from common.cli import input_path, positive_int
from common.files import Document, document_writer, write_text
from common.workers import Workers

_ITEM = 40  # words of an item of the evaluation set: in one of 20 documents


class Run(NamedTuple):
    """What one command took, in seconds."""

    wall: float
    cpu: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--texts", type=input_path, metavar="DIR", help="*.txt instead of Python's own documentation")
    parser.add_argument("--small", type=positive_int, default=30, metavar="N", help="documents of a small shard (30)")
    parser.add_argument("--large", type=positive_int, default=1000, metavar="N", help="of a large shard (1,000)")
    parser.add_argument("--rounds", type=positive_int, default=2, metavar="N", help="runs of each row (default 2)")


def _write(folder: Path, shards: int, documents: list[Document]) -> None:
    for shard in range(shards):
        with document_writer(folder / f"{shard:04d}.jsonl.zst") as write:
            for document in documents[shard::shards]:
                write(document)


def _commands(source: Path, items: Path, folder: Path) -> dict[str, list[object]]:
    return {
        "clean": ["corpus.clean", "--input", source, "--output", folder / "clean.jsonl.zst"],
        "dedup run": ["corpus.dedup", "run", "--input", source, "--output-dir", folder / "dedup"],
        "decontaminate run": [
            *("corpus.decontaminate", "run", "--files", items),
            *("--input", source, "--output-dir", folder / "decontaminated"),
        ],
        "tokenize": ["corpus.tokenize", "--input", source, "--output-prefix", folder / "tokens"],
    }


def _run(command: list[object], workers: int) -> Run:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    arguments = [sys.executable, "-m", *map(str, command), "--workers", str(workers)]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return Run(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _own_memory(_item: object) -> tuple[float, float]:
    """MB of this process: its share of all pages, and the pages that are its alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return sizes["Pss"] / 1024, (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024


def _memory() -> str:
    """What two workers of `clean` take that have each judged a language with langdetect."""
    from corpus.text.language import thorough_language

    thorough_language("What the profiles are loaded for")
    with Workers(2) as pool:
        list(pool.map(thorough_language, ["one and the same text"] * 50))
        pss, own = map(max, zip(*pool.map(_own_memory, range(8)), strict=True))
    return f"A worker of `clean`: {pss:.0f} MB of memory by its share of common pages, {own:.0f} MB of it its alone."


def measure(arguments: argparse.Namespace) -> str:
    """Rows of seconds for one and two workers, and their ratios."""
    documents, _ = make_documents(max(40 * arguments.small, 4 * arguments.large), arguments.texts)
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        items = folder / "items.txt"
        chosen = [" ".join(document["text"].split()[10 : 10 + _ITEM]) for document in documents[::20]]
        write_text(items, orjson.dumps(chosen).decode())
        kinds = (("40 small", 40, arguments.small), ("4 large", 4, arguments.large))
        for kind, shards, each in kinds:
            source = folder / kind.replace(" ", "_")
            _write(source, shards, documents[: shards * each])
            for step, command in _commands(source, items, folder / "out").items():
                pairs = [(_run(command, 1), _run(command, 2)) for _ in range(arguments.rounds)]
                one, two = zip(*pairs, strict=True)
                rows.append(
                    {
                        "step": step,
                        "shards": kind,
                        "documents": f"{shards * each:,}",
                        "s, 1 worker": f"{median(run.wall for run in one):.2f}",
                        "s, 2 workers": f"{median(run.wall for run in two):.2f}",
                        "ratio": f"{median(b.wall / a.wall for a, b in pairs):.2f}",
                        "CPU s, 1 worker": f"{median(run.cpu for run in one):.2f}",
                        "CPU s, 2 workers": f"{median(run.cpu for run in two):.2f}",
                        "CPU ratio": f"{median(b.cpu / a.cpu for a, b in pairs):.2f}",
                    }
                )
        load = f"{os.getloadavg()[0]:.1f} processes wanted to run in the last minute."
    return f"{table(rows)}\n\n{load} {_memory()}"
