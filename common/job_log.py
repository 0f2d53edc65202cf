"""The last line of a job's log: the time and peak memory of its command.

    finished after 12.3 s; largest process 812 MB

`common.cli` writes it when the command of a rule succeeds: `python -m corpus.clean … > 0000.log
2>&1`. The file's date is the end.
"""

import os
import re
import resource
import time
from pathlib import Path
from typing import NamedTuple

from common.config import JOB_SETTINGS
from common.console import say

_LAST_LINE = re.compile(r"finished after ([\d.]+) s; largest process (\d+) MB$")
_STARTED = time.monotonic()  # every command imports this module first


class JobTime(NamedTuple):
    """The time and memory of a finished command."""

    seconds: float
    """From the start of the process."""
    memory_mb: int
    """Largest resident set of one of its processes."""
    ended: float
    """Unix time."""


def finish() -> None:
    """Write the line if this process is a job of the workflow."""
    if JOB_SETTINGS in os.environ:
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = 1024 * max(resource.getrusage(each).ru_maxrss for each in who)
        say(f"finished after {time.monotonic() - _STARTED:.1f} s; largest process {peak / 1e6:.0f} MB")


def last_lines(path: Path) -> tuple[list[str], float]:
    """The lines in the last 4 KB of a log, at least an empty one, and its date in Unix time."""
    with path.open("rb") as log:
        status = os.fstat(log.fileno())
        log.seek(max(0, status.st_size - 4096))
        return log.read().decode(errors="replace").rstrip().split("\n"), status.st_mtime


def read(path: Path) -> JobTime | None:
    """The time and memory in a log; None while its command runs, and if it failed."""
    lines, ended = last_lines(path)
    match = _LAST_LINE.search(lines[-1])
    return JobTime(float(match[1]), int(match[2]), ended) if match else None
