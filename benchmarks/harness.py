"""One harness for all benchmarks: contenders that take turns, and the tables of their rows.

A case compares contenders on the same inputs. A contender prepares (imports, reading, a small run
to warm up) and returns a function; only calls of that function are timed. If it returns a dict,
that has more columns of the row. Rounds are interleaved, figures are medians over the rounds, and a
ratio compares runs of the same round, so that other load on the machine affects all contenders
alike.
"""

import argparse
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
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
"""A line of a table: column -> number, text or None. Other columns begin a new table."""
Timed = Callable[[], Any]


class Run(NamedTuple):
    """One timed call."""

    wall: float
    cpu: float
    """Seconds of the process and its finished children."""
    peak: int
    """Peak resident memory of the process, or of its largest child, in bytes."""
    columns: dict[str, Any]


def _fresh(label: str, prepare: Timed) -> Run:
    """Prepare and run in a new process. Raises JobError if that fails."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_prepared_run, prepare).result()
        except BrokenProcessPool:
            raise JobError(f"{label}: its process ended; what it printed says why") from None
        except Exception as error:
            raise JobError(f"{label}: {type(error).__name__}: {error}\n{str(error.__cause__).strip()}") from None


def _prepared_run(prepare: Timed) -> Run:
    return timed(prepare())


def timed(run: Timed) -> Run:
    """Call a function once."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    answer = run()
    taken = time.perf_counter() - wall, _cpu_seconds() - cpu
    return Run(*taken, _peak_memory(), answer if isinstance(answer, dict) else {})


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _peak_memory() -> int:
    """Peak resident memory, in bytes; getrusage's own value would include the parent's."""
    own = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return max(own, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def compare(
    title: str,
    contenders: Mapping[str, Timed],
    rounds: int,
    count: float,
    unit: str,
    clock: Literal["wall", "cpu"] = "wall",
    here: bool = False,
    before: Callable[[str], None] = lambda label: None,
) -> list[Row]:
    """A row per contender for `count` units; speed and ratio to the first contender are by `clock`.

    Each run has a new process; with `here`, all run in this process, and contenders are already
    prepared. `before` is called before each run.
    """
    runs: dict[str, list[Run]] = {label: [] for label in contenders}
    for _ in range(rounds):
        for label, contender in contenders.items():
            before(label)
            runs[label].append(timed(contender) if here else _fresh(label, contender))
    taken = {label: [getattr(run, clock) for run in own] for label, own in runs.items()}
    first = next(iter(taken.values()))
    return [
        {
            title: label,
            unit: count,
            "s": median(run.wall for run in own),
            "CPU s": median(run.cpu for run in own),
            f"{unit}/{'CPU s' if clock == 'cpu' else 's'}": count / median(taken[label]),
            "ratio": median(other / mine for mine, other in zip(taken[label], first, strict=True)),
            "peak MB": max(run.peak for run in own) / 1e6,
            **own[-1].columns,
        }
        for label, own in runs.items()
    ]


Case = tuple[Callable[[argparse.Namespace], Iterable[Row]], Mapping[str, Any]]
"""The function that `python -m benchmarks.AREA NAME` runs, and its options with their defaults.

It gets the options, and a temporary folder (in TMPDIR) as `work`; the first line of its docstring
is the help.
"""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "count": {"type": cli.positive_int, "metavar": "N", "help": "documents, URLs, shards or tokens"},
    "length": {"type": cli.positive_int, "metavar": "N", "help": "mean tokens per document"},
    "rounds": {"type": cli.positive_int, "metavar": "N", "help": "rounds per row"},
    "size": {"metavar": "NAME", "help": "size of the model"},
    "texts": {"type": cli.input_path, "nargs": "+", "metavar": "DIR", "help": "real texts or pages"},
    "micro-batch": {"type": cli.positive_int, "metavar": "N", "help": "samples"},
    "peer": {"type": Path, "metavar": "DIR", "help": "virtual environment of the peer; made if it does not exist"},
    "dropout": {"type": float, "metavar": "P", "help": "probability"},
    "tensor": {"type": cli.positive_int, "metavar": "N", "help": "tensor-parallel ranks"},
    "kernels": {"choices": ("on", "off"), "help": "whether our kernels are selected"},
}


def main(area: str, doc: str | None, cases: Mapping[str, Case], argv: Sequence[str] | None) -> int:
    """`python -m benchmarks.AREA NAME`: print each table of a case as soon as it is complete."""
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
    with TemporaryDirectory() as name:
        arguments.work = Path(name)
        for _, rows in groupby(cases[arguments.name][0](arguments), key=list):  # those with the same columns
            print(f"{table([*rows])}\n", flush=True)
    print(machine())
    return 0


def table(rows: Sequence[Row]) -> str:
    """Rows with equal columns as a Markdown table, without empty columns."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [{name: cell(row[name]) for name in columns} for row in rows]
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


def cell(value: Any) -> str:
    """A readable value: 204,123 or 12.3 or 0.0456; `-` for None."""
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
