"""One harness for all benchmarks: contenders that take turns, each in its own process, and the tables of their rows.

A case compares contenders on the same inputs. A contender's `work` prepares (imports, reading, a small run to warm up)
and returns a function; only calls of that function are timed. A dict that it returns has further columns for the row.
Rounds are interleaved, figures are medians over the rounds, and a ratio compares runs of the same round, so that other
load on the machine affects all contenders alike. `bar` is the ratio that a claim in docs/benchmarks.md promises.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from tabulate import tabulate

from common import cli
from common.errors import JobError

Row = Mapping[str, Any]
"""A line of a table: column -> a number, a text, or None. Rows with other columns begin a new table."""
Timed = Callable[[], object]


class Contender(NamedTuple):
    """One row of a comparison."""

    label: str
    work: Callable[..., Timed]
    arguments: tuple[Any, ...] = ()
    bar: float | None = None
    """The ratio that is claimed."""


class Run(NamedTuple):
    """One timed call."""

    wall: float
    cpu: float
    """Seconds of the process and its finished children."""
    peak: int
    """Peak resident memory of the process, or of its largest child, in bytes."""
    columns: dict[str, Any]


def _fresh(contender: Contender) -> Run:
    """Prepare and run in a new process. Raises JobError if that fails."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_prepared_run, contender).result()
        except BrokenProcessPool:
            raise JobError(f"{contender.label}: its process ended; what it printed says why") from None
        except Exception as error:
            trace = str(error.__cause__).strip()
            raise JobError(f"{contender.label}: {type(error).__name__}: {error}\n{trace}") from None


def _prepared_run(contender: Contender) -> Run:
    return timed(contender.work(*contender.arguments))


def timed(run: Timed) -> Run:
    """Call a function once."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    answer = run()
    taken = time.perf_counter() - wall, _cpu_seconds() - cpu
    return Run(*taken, peak_memory(), answer if isinstance(answer, dict) else {})


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def peak_memory() -> int:
    """Peak resident memory of this process, in bytes. getrusage's value would include the parent's at the fork."""
    own = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return max(own, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def compare(
    title: str,
    contenders: Sequence[Contender],
    rounds: int,
    count: float,
    unit: str,
    clock: Literal["wall", "cpu"] = "wall",
    here: bool = False,
    before: Callable[[str], None] = lambda label: None,
) -> list[Row]:
    """A row per contender, for `count` documents, bytes or tokens; `clock` gives speed and ratio to the first one.

    Each run has a new process; or all are in this one (`here`), where contenders share what takes long to prepare.
    `before` is called before each run, for example to remove what the one before has written.
    """
    runs: dict[str, list[Run]] = {contender.label: [] for contender in contenders}
    ready = {
        each.label: partial(timed, each.work(*each.arguments)) if here else partial(_fresh, each) for each in contenders
    }
    for _ in range(rounds):
        for label, run in ready.items():
            before(label)
            runs[label].append(run())
    rows: list[Row] = []
    for contender in contenders:
        own = runs[contender.label]
        taken, theirs = [[getattr(run, clock) for run in each] for each in (own, runs[contenders[0].label])]
        rows.append(
            {
                title: contender.label,
                unit: count,
                "s": median(run.wall for run in own),
                "CPU s": median(run.cpu for run in own),
                f"{unit}/{'CPU s' if clock == 'cpu' else 's'}": count / median(taken),
                "ratio": median(other / mine for mine, other in zip(taken, theirs, strict=True)),
                "bar": contender.bar,
                "peak MB": max(run.peak for run in own) / 1e6,
                **own[-1].columns,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------------ commands and tables


Case = tuple[Callable[[argparse.Namespace], Iterable[Row]], Mapping[str, Any]]
"""What `python -m benchmarks.AREA NAME` runs, described by its docstring, and its options with their defaults.

The function gets the options, and a temporary folder as `work`.
"""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "count": {"type": cli.positive_int, "metavar": "N", "help": "documents, URLs, pages, shards or steps"},
    "length": {"type": cli.positive_int, "metavar": "N", "help": "mean tokens per document, or MB of a file"},
    "rounds": {"type": cli.positive_int, "metavar": "N", "help": "rounds per row"},
    "size": {"metavar": "NAME", "help": "size of the model"},
    "texts": {"type": cli.input_path, "nargs": "+", "metavar": "DIR", "help": "real texts or pages"},
    "micro-batch": {"type": cli.positive_int, "metavar": "N", "help": "samples"},
    "dropout": {"type": float, "metavar": "P", "help": "probability"},
    "tensor": {"type": cli.positive_int, "metavar": "N", "help": "tensor-parallel ranks"},
    "kernels": {"choices": ("on", "off"), "help": "whether our kernels are selected"},
    "json": {"action": "store_true", "help": "a JSON object per row instead of a table"},
    "folder": {"type": cli.output_folder, "metavar": "DIR", "help": "where to write (default: a temporary folder)"},
}


def main(area: str, doc: str | None, cases: Mapping[str, Case], argv: Sequence[str] | None) -> int:
    """`python -m benchmarks.AREA NAME`: print the tables of a case, each as soon as it is complete."""
    parser = cli.parser(f"benchmarks.{area}", doc)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (measure, options) in cases.items():
        summary = str(measure.__doc__).partition("\n")[0]
        verb = verbs.add_parser(name, help=summary, description=summary)
        for option, default in options.items():
            words = dict(_OPTIONS[option])
            words["help"] += f" (default {default})" if default else ""
            verb.add_argument(f"--{option}", default=default, **words)
    arguments = parser.parse_args(argv)
    with TemporaryDirectory(dir=getattr(arguments, "folder", None)) as name:
        arguments.work = Path(name)
        found = cases[arguments.name][0](arguments)
        if getattr(arguments, "json", False):
            print(*(json.dumps(row) for row in found), sep="\n")
            return 0
        for rows in grouped(found):
            print(f"{table(rows)}\n", flush=True)
    print(machine())
    return 0


def grouped(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Consecutive rows with the same columns: those of a table."""
    return (list(same) for _, same in groupby(rows, key=list))


def table(rows: Sequence[Row]) -> str:
    """Rows with equal columns as a Markdown table, without columns that have no value."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [{name: cell(row[name]) for name in columns} for row in rows]
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


def cell(value: Any) -> str:
    """A value as a person reads it: 204,123 or 12.3 or 0.0456, `-` for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " to ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def machine() -> str:
    """`2 x AMD EPYC 9554, Python 3.11.7, 2026-11-20`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} x {name}, Python {platform.python_version()}, {datetime.now(UTC).date()}"


def run_command(*words: object) -> None:
    """Run `python -m WORDS` without its output."""
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
