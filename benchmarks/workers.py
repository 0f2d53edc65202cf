"""One worker against two: whole commands over many small and over few large shards, and the cost of a worker.

Each row runs both in turn; the wall-clock ratio is the median over the rounds, below 1 if two workers take less time.
If other work uses the cores, there is no gain in wall-clock time, but CPU time (user and system, including workers)
still shows the cost of the second worker. Documents are those of `dedup`: real sentences, one document in five a copy.
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
from common.files import Document, document_writer, shard_paths, write_text
from common.workers import Workers

_ITEM = 40  # words per item of the evaluation set; one of 20 documents contains one


class Run(NamedTuple):
    """Durations of one command, in seconds."""

    wall: float
    cpu: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--texts", type=input_path, metavar="DIR", help="*.txt instead of Python's own documentation")
    parser.add_argument(
        "--small", type=positive_int, default=30, metavar="N", help="documents per small shard (default 30)"
    )
    parser.add_argument(
        "--large", type=positive_int, default=1000, metavar="N", help="documents per large shard (default 1,000)"
    )
    parser.add_argument("--rounds", type=positive_int, default=2, metavar="N", help="rounds per row (default 2)")


def _write(folder: Path, shards: int, documents: list[Document]) -> None:
    for shard, path in enumerate(shard_paths(folder, shards, ".jsonl.zst")):
        with document_writer(path) as write:
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
    """Memory of this process in MB: its share of all pages (PSS), and its private pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return sizes["Pss"] / 1024, (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024


def _memory() -> str:
    """Memory of two workers of `clean` after each has used langdetect."""
    from corpus.text.language import thorough_language

    thorough_language("What the profiles are loaded for")
    with Workers(2) as pool:
        list(pool.map(thorough_language, ["one and the same text"] * 50))
        pss, own = map(max, zip(*pool.map(_own_memory, range(8)), strict=True))
    return f"A worker of `clean`: {pss:.0f} MB of memory (PSS), of which {own:.0f} MB are private."


def measure(arguments: argparse.Namespace) -> str:
    """Seconds of one and of two workers, and their ratios."""
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
        load = f"{os.getloadavg()[0]:.1f} processes were runnable on average in the last minute."
    return f"{table(rows)}\n\n{load} {_memory()}"
