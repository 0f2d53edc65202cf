"""What each kernel takes of a multiprocessor, from the log of its compilation (ptxas -v)."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

HEADER = ("kernel", "registers", "shared bytes", "spilled bytes")

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    """One kernel: the most that any of its types and widths takes, for each architecture that differs (`48/40/35`)."""

    kernel: str
    registers: str
    """Per thread."""
    shared: str
    """Bytes per block."""
    spilled: str
    """Bytes per thread that did not fit in registers, stored and loaded."""


def read_log(path: Path) -> list[Resources]:
    """A row per kernel, by name; architectures from the oldest to the newest."""
    found: dict[str, dict[int, list[int]]] = {}
    mangled, architecture, spilled = "", 0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _KERNEL.search(line):
            mangled, architecture, spilled = match[1], int(match[2]), 0
        elif match := _SPILLS.search(line):
            spilled = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            numbers = [int(match[1]), int(shared[1]) if shared else 0, spilled]
            most = found.setdefault(mangled, {}).setdefault(architecture, numbers)
            most[:] = map(max, most, numbers)
    kernels: dict[str, dict[int, list[int]]] = {}
    for name, by_architecture in zip(_names(list(found)), found.values(), strict=True):
        for architecture, numbers in by_architecture.items():
            most = kernels.setdefault(name, {}).setdefault(architecture, numbers)
            most[:] = map(max, most, numbers)
    return [
        Resources(name, *(_joined(column) for column in zip(*(rows[key] for key in sorted(rows)), strict=True)))
        for name, rows in sorted(kernels.items())
    ]


def _joined(values: tuple[int, ...]) -> str:
    return "/".join(map(str, values if len(set(values)) > 1 else values[:1]))


def _names(mangled: list[str]) -> list[str]:
    """`statistics` for each symbol that is statistics<float, 4>, where c++filt is installed."""
    tool = shutil.which("c++filt")
    if tool is None or not mangled:
        return mangled
    done = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = [line.replace("(anonymous namespace)::", "") for line in done.stdout.splitlines()]
    return [re.sub(r"^void |[<(].*$", "", name) for name in names]
