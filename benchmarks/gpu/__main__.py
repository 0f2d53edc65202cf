"""Everything that needs a GPU, in one command: kernels built and tested, then each table, written as soon as it exists.

    python -m benchmarks.gpu --out results/gpu
    python -m benchmarks.gpu --out results/gpu --only step --rows 345m
    python -m benchmarks.gpu --out results/gpu --toy

DIR then has report.md with the tables, tests.txt with what the compiler and pytest printed, and rows.jsonl with all
figures. Each measurement has its own process: one that fails or hangs is reported, and the next one begins. What has
not ended after --minutes is ended. `--toy` is a rehearsal at toy size, on a CPU if there is no GPU. Exit code 1:
something failed.

Nothing is fetched. Beside PyTorch, NumPy, transformers, pytest, hypothesis, PyYAML, psutil, tabulate, rich, xxhash,
safetensors and tensorboard it needs pydantic, pydantic_core, annotated_types, typing_inspection, orjson, zstandard.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.gpu.items import Context, Item, describe, kernels, machine, run_tests, send_rows
from benchmarks.gpu.steps import checkpoints, generating, items
from benchmarks.harness import Row, grouped, table
from common import cli
from common.errors import InputError
from common.files import write_text

PARTS = ("machine", "tests", "kernels", "step", "checkpoint", "generate", "planning")


def plan(only: Sequence[str], rows: Sequence[str], toy: bool) -> list[Item]:
    """The items of the chosen parts, those first that say most.

    `rows`: of the parts `step` and `planning`, those whose name contains one of these texts.
    """
    steps = items("step", toy)
    every = [
        Item("tests", "build", None, limit=60),
        Item("tests", "pytest -m gpu", None, limit=100),  # three rows follow within four minutes from the start
        *steps[:3],
        Item("machine", "copy and products", machine),
        Item("kernels", "345m, micro-batch 32", kernels),
        *steps[3:6],
        Item("checkpoint", "345m", checkpoints),
        Item("generate", "greedy", generating),
        *steps[6:],
        *items("planning", toy),
    ]
    chosen = [item for item in every if not only or item.part in only]
    named = ("step", "planning")
    return [item for item in chosen if item.part not in named or not rows or any(text in item.name for text in rows)]


class Report:
    """The files of a run, written again whenever a row arrives."""

    def __init__(self, folder: Path, head: str = "") -> None:
        self.folder, self.head = folder, head
        self.rows: dict[str, list[Row]] = {part: [] for part in PARTS}
        self.notes: list[str] = []
        self.failed = False
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_bytes(b"")

    def add(self, item: Item, row: Row) -> None:
        """A row of a table."""
        self.rows[item.part].append(row)
        with (self.folder / "rows.jsonl").open("ab") as file:
            file.write(orjson.dumps({"part": item.part, "item": item.name, **row}) + b"\n")
        self._write()
        print(f"{item.part}: " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def note(self, item: Item, text: str, failed: bool = False) -> None:
        """What happened to an item that has no row."""
        self.failed |= failed
        self.notes.append(f"{item.part}: {'FAILED: ' * failed}{item.name}: {text}")
        self._write()
        print(self.notes[-1], flush=True)

    def _write(self) -> None:
        sections = [self.head]
        for part, rows in self.rows.items():
            sections += [f"## {part}", *map(table, grouped(rows))] if rows else []
        sections += ["## Notes", *(f"```\n{note}\n```" for note in self.notes)] if self.notes else []
        write_text(self.folder / "report.md", "\n\n".join(sections) + "\n")


def measure(item: Item, report: Report, context: Context, limit: float) -> None:
    """Run an item in a process of its own, and report what it sends within `limit` seconds."""
    deadline = time.monotonic() + limit
    with started(send_rows, item.run, context) as pipe:
        try:
            while pipe.poll(deadline - time.monotonic()):
                answer = pipe.recv()
                if isinstance(answer, str):
                    first, memory = answer.partition("\n")[0], "out of memory" in answer.lower()
                    report.note(item, first if memory else answer, failed=not memory)
                if not isinstance(answer, dict):
                    return
                report.add(item, answer)
            report.note(item, f"ended after {limit:.0f} s", failed=True)
        except EOFError:
            report.note(item, "its process ended; what it printed says why", failed=True)


@contextmanager
def started(work: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `work(pipe, *arguments)` in a process of its own; yields the other end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that the end of the process is noticed
    try:
        yield ours
    finally:
        ours.close()
        process.join(5)
        process.kill()
        process.join()


def run(chosen: Sequence[Item], report: Report, context: Context, minutes: float) -> None:
    """Run the items within the time."""
    deadline = time.monotonic() + 60 * minutes
    for item in chosen:
        left = min(deadline - time.monotonic(), item.limit)
        if not context.gpu and item.name == "build":
            report.note(item, "skipped: no GPU")
        elif left <= 0:
            report.note(item, "left out: no time is left for it")
        elif item.run is None:
            row = run_tests(item.name, left, context.gpu, report.folder / "tests.txt")
            report.add(item, row)
            if row["ended"] != "ok":
                report.note(item, f"{row['ended']}; see tests.txt", failed=True)
        else:
            measure(item, report, context, left)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("benchmarks.gpu", __doc__)
    parser.add_argument("--out", type=cli.output_folder, required=True, metavar="DIR", help="where to write the tables")
    parser.add_argument("--toy", action="store_true", help="rehearse at toy size")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="TEXT", help="only steps and layouts whose names contain a TEXT"
    )
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="time for everything (default 9)")
    arguments = parser.parse_args(argv)
    from training.launch.device import set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)  # its environment is that of all processes, which are forks of one that has
    multiprocessing.set_forkserver_preload(["training.trainer", "training.probe"])  # imported all, and reached no GPU
    with started(describe) as pipe:
        gpu, device = pipe.recv()
    if not gpu and not arguments.toy:
        raise InputError("no GPU; --toy rehearses on CPUs")
    report = Report(arguments.out, f"{device}, {datetime.now(UTC).date()}{', toy size' * arguments.toy}")
    print(report.head, flush=True)
    with TemporaryDirectory() as folder:
        context = Context(Path(folder), arguments.toy, gpu)
        run(plan(arguments.only, arguments.rows, arguments.toy), report, context, arguments.minutes)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(cli.run(main))
