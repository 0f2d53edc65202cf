"""Everything that needs a GPU, in one command: kernels built and tested, then each table, written as soon as it exists.

    python -m benchmarks.gpu --out results/gpu
    python -m benchmarks.gpu --out results/gpu --only step profile --rows 345m
    python -m benchmarks.gpu --out results/gpu --toy

DIR then has at most 8 files: machine.md, kernels.md, step.md, checkpoint.md, generate.md and planning.md with the
tables, tests.txt with what the compiler and pytest printed, and rows.jsonl with all figures. Each measurement is
isolated: one that fails or hangs is reported in its file, and the next one begins. Nothing begins that cannot end
within --minutes. `--toy` is a rehearsal at toy size, on a CPU if there is no GPU. Exit code 1: something failed.

Nothing is fetched. Beside PyTorch, NumPy, transformers, pytest, hypothesis, PyYAML, psutil, tabulate, rich, xxhash,
safetensors and tensorboard it needs pydantic, pydantic_core, annotated_types, typing_inspection, orjson, zstandard.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu import suite
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.machine import ceilings
from benchmarks.gpu.output import Report
from benchmarks.gpu.parts import FILES, PARTS, RESERVED
from benchmarks.gpu.worker import Worker
from common import cli

_MARGIN = 5.0  # seconds for the last files


def plan(only: Sequence[str], rows: Sequence[str], toy: bool) -> list[Item]:
    """The items of the chosen parts, in order; the machine's always, because others refer to them.

    `rows`: of the parts `step` and `planning`, those whose name contains one of these texts.
    """
    chosen = [item for part in PARTS if not only or part in {"machine", *only} for item in PARTS[part].items(toy)]
    named = ("step", "planning")
    return [item for item in chosen if item.part not in named or not rows or any(text in item.name for text in rows)]


def run(items: Sequence[Item], report: Report, worker: Worker, context: Context, minutes: float) -> None:
    """Run the items within the time."""
    deadline = time.monotonic() + 60 * minutes - _MARGIN
    chosen = list(dict.fromkeys(item.part for item in items))
    for item in items:
        later = chosen[chosen.index(item.part) + 1 :]
        left = deadline - time.monotonic() - sum(RESERVED.get(part, 0.0) for part in later)
        if not context.gpu and not (item.on_cpu and context.toy):
            report.note(item, "skipped: no GPU")
        elif left < (item.seconds if context.gpu else 0):
            report.note(item, f"left out: it needs {item.seconds:.0f} s, and {max(0.0, left):.0f} s are left for it")
        elif item.part == "tests":
            row = suite.run(item, left if item.name == "build" else min(left, 200), context.gpu, _log(report))
            report.add(item, row)
            if row["ended"] != "ok":
                report.note(item, f"{row['ended']}; see tests.txt", failed=True)
        else:
            _measure(item, report, worker, context, min(left, 3 * item.seconds))
            copy, product = ceilings(report.rows["machine"])
            context = replace(context, copy=copy, product=product, rows=report.rows)


def _log(report: Report) -> Path:
    return report.folder / "tests.txt"


def _measure(item: Item, report: Report, worker: Worker, context: Context, limit: float) -> None:
    """Run an item in the worker, and report what it says."""
    try:
        for message in worker.run(item, context, limit):
            if message.kind == "row":
                report.add(item, message.row)
            else:
                report.note(item, message.text, failed=message.kind == "failed")
    except (OSError, EOFError) as error:
        report.note(item, f"its process did not start: {error}", failed=True)


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
    arguments: Namespace = parser.parse_args(argv)
    report = Report(arguments.out, {part: module.TITLE for part, module in PARTS.items()}, FILES)
    with TemporaryDirectory() as folder, closing(Worker(arguments.toy)) as worker:
        device = worker.start()
        report.head = f"{device.head}, {datetime.now(UTC).date()}{', toy size' * arguments.toy}"
        print(report.head, flush=True)
        context = Context(Path(folder), arguments.toy, device.gpu)
        run(plan(arguments.only, arguments.rows, arguments.toy), report, worker, context, arguments.minutes)
    for line in report.goals():
        print(f"goal: {line}")
    for line in report.failed:
        print(f"FAILED: {line}")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(cli.run(main))
