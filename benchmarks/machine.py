"""What every benchmark shares: its command line, its table, the line with machine and date, and isolated processes."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from tabulate import tabulate

from common import cli

Result = TypeVar("Result")


def run_one(area: str, doc: str | None, names: Mapping[str, str], argv: Sequence[str] | None) -> int:
    """`python -m benchmarks.AREA NAME`: run the module benchmarks.NAME and print its table.

    `names` maps each NAME to a line about what it compares. Returns the exit code.
    """
    parser = cli.parser(f"benchmarks.{area}", doc)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {name: import_module(f"benchmarks.{name}") for name in names}
    for name, summary in names.items():
        modules[name].add_options(verbs.add_parser(name, help=summary))
    arguments = parser.parse_args(argv)
    print(modules[arguments.name].measure(arguments))
    return 0


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with equal keys as a Markdown table, followed by the machine and the date."""
    lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    return f"{lines}\n\n{machine()}"


def machine() -> str:
    """`2 x AMD EPYC 9554, Python 3.11.7, 2026-11-20`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{os.cpu_count()} x {name}, Python {platform.python_version()}, {datetime.now(UTC).date()}"


def peak_memory() -> int:
    """Peak resident memory of this process, in bytes. getrusage's value would include the parent's at the fork."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def alone(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a fresh process, so that its memory can be measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
