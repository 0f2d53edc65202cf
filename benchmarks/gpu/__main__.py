"""Everything that needs a GPU, in one command: kernels built and tested, then each table, written as soon as it exists.

    python -m benchmarks.gpu --out results/gpu
    python -m benchmarks.gpu --out results/gpu --only step profile --rows 345m
    python -m benchmarks.gpu --out results/gpu --toy

DIR then has a Markdown file per part with its tables and goals, tests.txt with what the compiler and pytest printed,
and rows.jsonl with all figures. Each measurement has its own process: one that fails or hangs is reported in its file,
and the next one begins. Nothing begins that cannot end within --minutes. `--toy` is a rehearsal at toy size, on a CPU
if there is no GPU. Exit code 1: something failed.

Nothing is fetched. Beside PyTorch, NumPy, transformers, pytest, hypothesis, PyYAML, psutil, tabulate, rich, xxhash,
safetensors and tensorboard it needs pydantic, pydantic_core, annotated_types, typing_inspection, orjson, zstandard.
"""

import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from benchmarks.gpu.items import Context, Item, copy, describe, kernels, losses, products, rows_of, run_tests
from benchmarks.gpu.steps import checkpoints, generating, planning_items, profile, step_items
from benchmarks.harness import Contender, Process, Row, grouped, table
from common import cli
from common.errors import InputError, JobError
from common.files import write_text

TITLES = {
    "machine": "The machine: copies and matrix products",
    "tests": "Build and tests",
    "kernels": "Kernels and the loss: milliseconds, and bandwidth beside a copy's",
    "step": "The step: tokens per second on one GPU, bfloat16",
    "checkpoint": "Checkpoints: GB/s from and to the GPU, and saves in the background",
    "generate": "Generating: tokens per second",
    "profile": "Profile of the best step",
    "planning": "The planner: predicted and measured memory and time of a step on one GPU",
}
"""The parts, in the order in which they run."""
_RESERVED = {"kernels": 85.0, "step": 120.0, "checkpoint": 50.0, "generate": 20.0, "profile": 45.0}
"""Seconds that earlier parts leave for a part."""
_START = 180.0  # seconds to import torch and reach the GPU


def plan(only: Sequence[str], rows: Sequence[str], toy: bool) -> list[Item]:
    """The items of the chosen parts, in order; the machine's always, because others refer to them.

    `rows`: of the parts `step` and `planning`, those whose name contains one of these texts.
    """

    def unused(_context: Context) -> Iterator[Row]:
        raise NotImplementedError  # the tests run in a command of their own

    every = [
        Item("machine", "copy", copy),
        Item("machine", "products", products, 20),
        Item("tests", "build", unused, 45),
        Item("tests", "pytest -m gpu", unused, 30 if toy else 100),
        Item("kernels", "345m, micro-batch 8", kernels, 60),
        Item("kernels", "loss", losses, 25),
        *step_items(toy),
        Item("checkpoint", "345m", checkpoints, 45),
        Item("generate", "greedy", generating, 20),
        Item("profile", "best step of 345m", profile, 45),
        *planning_items(toy),
    ]
    chosen = [item for item in every if not only or item.part in {"machine", *only}]
    named = ("step", "planning")
    return [item for item in chosen if item.part not in named or not rows or any(text in item.name for text in rows)]


class Report:
    """The files of a run, rewritten whenever a row arrives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.head = folder, "no device yet"
        self.rows: dict[str, list[Row]] = {part: [] for part in TITLES}
        self.notes: dict[str, list[str]] = {part: [] for part in TITLES}
        self.failed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_bytes(b"")

    def add(self, item: Item, row: Row) -> None:
        """A row of a table."""
        self.rows[item.part].append(row)
        with (self.folder / "rows.jsonl").open("ab") as file:
            file.write(orjson.dumps({"part": item.part, "item": item.name, **row}) + b"\n")
        self._write(item.part)
        print(f"{item.part}: " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def note(self, item: Item, text: str, failed: bool = False) -> None:
        """What happened to an item that has no row: its first line is printed, too."""
        first, _, rest = text.partition("\n")
        line = f"{'FAILED: ' * failed}{item.name}: {first}"
        self.notes[item.part].append(f"- {line}" + (f"\n\n```\n{rest.strip()}\n```\n" if rest else ""))
        self.failed += [f"{item.part}: {line}"] * failed
        self._write(item.part)
        print(f"{item.part}: {line}", flush=True)

    def _write(self, part: str) -> None:
        sections = [self.head, f"## {TITLES[part]}", *map(table, grouped(self.rows[part]))]
        reached, notes = goals({part: self.rows[part]}), self.notes[part]
        sections += ["Goals:\n\n" + "\n".join(f"- {line}" for line in reached)] * bool(reached)
        sections += ["Notes:\n\n" + "\n".join(notes)] * bool(notes)
        write_text(self.folder / f"{part}.md", "\n\n".join(sections) + "\n")


def goals(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line per goal on which there are rows."""
    lines = []

    def judge(goal: str, found: str, reached: bool) -> None:
        lines.append(f"{goal}: {found}, {'reached' if reached else 'NOT reached'}")

    steps = [row for row in rows.get("step", ()) if row["step"] == "ours"]
    for size, least, remark in (
        ("345m", 50.0, "204k tokens/s on an H100 or H200; best published 46.2 %"),
        ("124m", 40.5, "llm.c's"),
    ):
        found = [row for row in steps if row["size"] == size and not row["dropout"] and row["MFU %"] is not None]
        if found:
            best = max(found, key=lambda row: float(row["MFU %"]))
            text = f"{best['MFU %']:.1f} % at micro-batch {best['micro']} {best['variant']}".rstrip()
            judge(f"{size} at dropout 0: {least} % MFU or more ({remark})", text, best["MFU %"] >= least)
    rate = {(row["size"], row["micro"], row["dropout"], row["variant"]): row["tokens/s"] for row in steps}
    for (*same, variant), off in rate.items():
        if variant == "kernels off" and (auto := rate.get((*same, ""))):
            # 1 %: two runs of the same step differ by as much
            judge("kernels auto not slower than off", f"{auto / off:.3f} of its tokens per second", auto > 0.99 * off)
    shares = {row["kernel"]: row["of a copy %"] for row in rows.get("kernels", ()) if row.get("of a copy %")}
    if shares:
        name, share = min(shares.items(), key=lambda entry: float(entry[1]))
        judge("kernels at 85 % or more of a copy's bandwidth", f"the least is {name} with {share:.0f} %", share >= 85)
    forms = {row["loss"]: row for row in rows.get("kernels", ()) if row.get("peak GB") is not None}
    if "chunked" in forms:
        fastest = min((forms[name] for name in forms if "whole" in str(name)), key=lambda row: float(row["ms"]))
        slower, smaller = (forms["chunked"][key] / fastest[key] for key in ("ms", "peak GB"))
        goal = "loss in parts: at most 1.2 times the time of the fastest whole one, and a quarter of its memory"
        judge(goal, f"{slower:.2f} times the time, {smaller:.2f} of the memory", slower <= 1.2 and smaller <= 0.25)
    planned = [row for row in rows.get("planning", ()) if row["device"] == "cuda"]
    for key, most in {"memory error %": 10.0, "time error %": 15.0}.items() if planned else ():
        worst = max(planned, key=lambda row: abs(float(row[key])))
        what = f"{worst['size']}, micro-batch {worst['micro']}, {worst['variant']}"
        text = f"the worst of {len(planned)} is {worst[key]:+.1f} % at {what}"
        judge(f"predicted {key.removesuffix(' error %')} within {most:g} %", text, abs(worst[key]) <= most)
    return lines


def measure(item: Item, report: Report, context: Context, limit: float) -> None:
    """Run an item in a process of its own, and report what it says."""
    contender = Contender(item.name, rows_of, (item, context))
    try:
        with Process(contender, "forkserver", max(limit, _START)) as process:
            while row := process.run().columns:
                report.add(item, row)
    except JobError as error:
        text = str(error).removeprefix(f"{item.name}: ")
        memory = "out of memory" in text.partition("\n")[0].lower()  # the trainer's, PyTorch's or CUDA's
        report.note(item, text.partition("\n")[0] if memory else text, failed=not memory)


def run(items: Sequence[Item], report: Report, context: Context, minutes: float) -> None:
    """Run the items within the time."""
    deadline = time.monotonic() + 60 * minutes - 5  # seconds for the last files
    parts = list(dict.fromkeys(item.part for item in items))
    for item in items:
        later = parts[parts.index(item.part) + 1 :]
        left = deadline - time.monotonic() - sum(_RESERVED.get(part, 0.0) for part in later)
        if not context.gpu and item.name == "build":
            report.note(item, "skipped: no GPU")
        elif left < (item.seconds if context.gpu else 0):
            report.note(item, f"left out: it needs {item.seconds:.0f} s, and {max(0.0, left):.0f} s are left for it")
        elif item.part == "tests":
            row = run_tests(item.name, min(left, 200), context.gpu, report.folder / "tests.txt")
            report.add(item, row)
            if row["ended"] != "ok":
                report.note(item, f"{row['ended']}; see tests.txt", failed=True)
        else:
            measure(item, report, replace(context, rows=report.rows), min(left, 3 * item.seconds))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("benchmarks.gpu", __doc__)
    parser.add_argument("--out", type=cli.output_folder, required=True, metavar="DIR", help="where to write the tables")
    parser.add_argument("--toy", action="store_true", help="rehearse at toy size")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=[], metavar="PART", help=f"of {', '.join(TITLES)}")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="TEXT", help="only steps and layouts whose names contain a TEXT"
    )
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="time for everything (default 9)")
    arguments: Namespace = parser.parse_args(argv)
    from training.launch.device import set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)  # its environment is that of all processes, which are forks of one that has
    multiprocessing.set_forkserver_preload(["training.trainer", "training.probe"])  # imported all, and reached no GPU
    report = Report(arguments.out)
    with Process(Contender("the device", describe), "forkserver", _START) as process:
        device: dict[str, Any] = process.run().columns
    if not device["gpu"] and not arguments.toy:
        raise InputError("no GPU; --toy rehearses on CPUs")
    report.head = f"{device['head']}, {datetime.now(UTC).date()}{', toy size' * arguments.toy}"
    print(report.head, flush=True)
    with TemporaryDirectory() as folder:
        context = Context(Path(folder), arguments.toy, device["gpu"])
        run(plan(arguments.only, arguments.rows, arguments.toy), report, context, arguments.minutes)
    for line in goals(report.rows):
        print(f"goal: {line}")
    for line in report.failed:
        print(line)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(cli.run(main))
