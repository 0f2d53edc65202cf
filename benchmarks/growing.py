"""Ten percent more documents as a run that grows the first one, against everything as one run, from ingest to dataset.

    python -m benchmarks.growing --count 40000 --work /scratch/growing

A document has 600 to 1,200 words, 5 kB on average; one in ten is an earlier one with a word changed. Each run is one
`snakemake dataset` on this machine, with all that starting Snakemake and its jobs costs. Bytes are those of the read
calls of all its processes (/proc/self/io), so files in the page cache count, too; so do Python's own modules, which a
run of one document measures.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from common import cli
from common.console import text_table
from common.files import Document, document_writer, read_json, short_hash

_ROOT = Path(__file__).resolve().parents[1]


_VOCABULARY = [f"{random.Random(number).getrandbits(40):x}"[: 2 + number % 9] for number in range(30_000)]


def _words(number: int) -> list[str]:
    rng = random.Random(number)
    return rng.choices(_VOCABULARY, k=rng.randint(600, 1200))


def _documents(start: int, end: int) -> Iterator[Document]:
    for number in range(start, end):
        words = _words(number)
        if number % 10 == 9:
            words = _words(random.Random(-number).randrange(number) // 10 * 10)
            words[number % len(words)] = f"changed{number}"
        yield {"url": f"https://site.example/{number}", "id": short_hash(str(number)), "text": " ".join(words)}


def _read() -> int:
    """Bytes that this process and the children that it has waited for have read."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def _run(work: Path, name: str, sources: Sequence[Path], base: Sequence[str] = ()) -> list[float]:
    """Seconds, GB read and documents of the dataset of one run."""
    config = {
        "run": f"results/{name}",
        "base": list(base),
        "sources": [{"path": str(path)} for path in sources],
        "shards": 4,
        "clean": {"language": "", "min_characters": 0},
        "dedup": {"jobs": 2},
        "tokenize": {"min_tokens": 0},
    }
    (work / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", "dataset", "--quiet", "all", "--cores", "2"]
    started, before = time.monotonic(), _read()
    subprocess.run([*command, "--configfile", f"{name}.yaml"], cwd=work, check=True)
    seconds, read = time.monotonic() - started, (_read() - before) / 1e9
    return [seconds, read, read_json(work / "results" / name / "dataset/stats.json")["documents_out"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser("benchmarks.growing", description=__doc__)
    parser.add_argument("--count", type=cli.positive_int, default=40_000, help="documents of the first run")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    arguments = parser.parse_args(argv)
    work, count = arguments.work, arguments.count
    work.mkdir(parents=True, exist_ok=True)
    for name in ("Snakefile", "workflow", "profiles"):
        (work / name).symlink_to(_ROOT / name)
    parts = {"one": (0, 1), "first": (0, count), "more": (count, count + count // 10)}
    files = {name: work / f"texts/{name}.jsonl.zst" for name in parts}
    for name, (start, end) in parts.items():
        with document_writer(files[name]) as write:
            for document in _documents(start, end):
                write(document)
    both = [files["first"], files["more"]]
    rows = {
        "one document": _run(work, "one", [files["one"]]),
        "first": _run(work, "first", both[:1]),
        "10 % more": _run(work, "more", both, ["results/first"]),
        "everything": _run(work, "everything", both),
    }
    rows["10 % more / everything"] = [a / b for a, b in zip(rows["10 % more"], rows["everything"], strict=True)]
    shown = [[name, *(f"{figure:,.2f}" for figure in figures)] for name, figures in rows.items()]
    print(text_table([["run", "s", "GB read", "documents"], *shown], "lrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
