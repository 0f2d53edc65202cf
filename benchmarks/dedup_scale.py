"""What each phase of deduplication reads, writes and holds, over synthetic documents; and what ten percent more cost.

    python -m benchmarks.dedup_scale --count 1000000 --work /scratch/dedup
    python -m benchmarks.dedup_scale --count 1000000 --work /scratch/dedup --grow 0.1 dedup.memory_gb=0.5

A document has 90 words on average; one in ten is another one with a word changed, anywhere in the corpus. Each phase
is one process; bytes are those of its read and write calls after its imports (/proc/self/io), so what the page cache
holds counts, too.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import cli
from common.console import text_table
from common.files import Document, document_writer, shard_paths, short_hash

_SHARD = 50_000  # documents
_VOCABULARY = [f"{random.Random(number).getrandbits(40):x}"[: 2 + number % 9] for number in range(30_000)]
# the exit code, seconds, peak memory and /proc/self/io of a phase, as its last line
_MEASURED = """
import resource, sys, time
import datasketch, scipy.sparse.csgraph
from corpus.dedup.__main__ import main
def io():
    return [int(line.split(": ")[1]) for line in open("/proc/self/io").read().splitlines()[:2]]
before, started = io(), time.monotonic()
main(sys.argv[1:])
seconds = time.monotonic() - started
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *(now - then for now, then in zip(io(), before)))
"""


def _text(number: int, words: int) -> str:
    rng = random.Random(number)
    return " ".join(rng.choices(_VOCABULARY, k=rng.randint(words * 2 // 3, words * 4 // 3)))


def documents(start: int, end: int, words: int) -> Iterator[Document]:
    """The documents of these numbers; every tenth is a near duplicate of one with a smaller number."""
    for number in range(start, end):
        text = _text(number, words)
        if number % 10 == 9:
            parts = _text(random.Random(-number).randrange(number) // 10 * 10, words).split()
            parts[number % len(parts)] = f"changed{number}"
            text = " ".join(parts)
        yield {"id": short_hash(str(number)), "text": text}


def _write(folder: Path, start: int, end: int, words: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = shard_paths(folder, -(-(end - start) // _SHARD), ".jsonl.zst")
    for first, path in zip(range(start, end, _SHARD), paths, strict=True):
        with document_writer(path) as write:
            for document in documents(first, min(end, first + _SHARD), words):
                write(document)
    return paths


def _phases(shards: Sequence[Path], work: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Rows of a table: phase, seconds, MB read, MB written, MB of memory."""
    folder = ["--work", str(work)]
    each = [["--input", str(shard), *folder] for shard in shards]
    commands = {
        "signatures": each,
        "bands": [[*folder, "--part", "0/1"]],
        "verify": [[*folder, "--part", "0/1"]],
        "clusters": [folder],
        "filter": [[*one, "--output-dir", str(work.parent / "kept")] for one in each],
    }
    rows, total = [], [0.0] * 4
    for phase, calls in commands.items():
        found = []
        for call in calls:
            command = [sys.executable, "-c", _MEASURED, phase, *call, *overrides]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append([float(figure) for figure in output.splitlines()[-1].split()])
        seconds, memory, read, written = zip(*found, strict=True)
        figures = [sum(seconds), sum(read) / 1e6, sum(written) / 1e6, max(memory) / 1e3]
        rows.append([phase, *(f"{figure:,.0f}" for figure in figures)])
        total = [*(a + b for a, b in zip(total[:3], figures[:3], strict=True)), max(total[3], figures[3])]
    return [*rows, ["all", *(f"{figure:,.0f}" for figure in total)]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser("benchmarks.dedup_scale", description=__doc__)
    parser.add_argument("--count", type=cli.positive_int, default=100_000, help="documents")
    parser.add_argument("--words", type=cli.positive_int, default=90, help="mean words of a document")
    parser.add_argument("--grow", type=float, default=0.0, help="share of further documents, deduplicated alone")
    parser.add_argument("--work", type=Path, required=True, help="folder for shards and phases")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    more = int(arguments.count * arguments.grow)
    runs: list[tuple[str, int, int, list[str]]] = [("documents", 0, arguments.count, [])]
    if more:
        against = f"dedup.against=[{arguments.work / 'documents/work'}]"
        runs += [("more", arguments.count, arguments.count + more, [against])]
        runs += [("whole", 0, arguments.count + more, [])]
    for name, start, end, overrides in runs:
        shards = _write(arguments.work / name / "in", start, end, arguments.words)
        rows = _phases(shards, arguments.work / name / "work", [*arguments.overrides, *overrides])
        print(f"{name}: {end - start:,} documents in {len(shards)} shards")
        print(text_table([["phase", "s", "MB read", "MB written", "MB of memory"], *rows], "lrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
