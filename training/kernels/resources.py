"""What each kernel takes of a multiprocessor, from the log of its compilation (ptxas -v)."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

HEADER = ("kernel", "registers", "shared bytes", "spilled bytes")

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    """One kernel, for one or several architectures (`24/22/24`)."""

    kernel: str
    registers: str
    shared: str
    spilled: str


def read_log(path: Path) -> list[Resources]:
    """A row per kernel, by name; numbers that differ between architectures are given for each, oldest first."""
    found: dict[str, dict[int, tuple[str, str, str]]] = {}
    mangled = architecture = ""
    spilled = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _KERNEL.search(line):
            mangled, architecture, spilled = match[1], match[2], 0
        elif match := _SPILLS.search(line):
            spilled = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            numbers = (match[1], shared[1] if shared else "0", str(spilled))
            found.setdefault(mangled, {})[int(architecture[3:])] = numbers
    names = _readable(list(found))
    rows = []
    for name, by_architecture in zip(names, found.values(), strict=True):
        columns = zip(*(by_architecture[key] for key in sorted(by_architecture)), strict=True)
        rows.append(Resources(name, *(_joined(column) for column in columns)))
    return sorted(rows)


def _joined(values: tuple[str, ...]) -> str:
    return values[0] if len(set(values)) == 1 else "/".join(values)


def _readable(mangled: list[str]) -> list[str]:
    """`statistics<float, 4>` for each symbol, where c++filt is installed."""
    tool = shutil.which("c++filt")
    if tool is None or not mangled:
        return mangled
    done = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = [line.replace("(anonymous namespace)::", "") for line in done.stdout.splitlines()]
    return [re.sub(r"^void |\(.*$", "", name) for name in names]
