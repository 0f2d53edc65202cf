"""The last line of a job's log: how long its command took, and how much memory it needed.

    finished after 12.3 s; largest process 812 MB

`common.cli` writes it when the command of a rule of the workflow succeeds and its output goes to a log, that is, when
stdout and stderr are the same file: `python -m corpus.clean … > 0000.log 2>&1`. The file's date is the end.
"""

import os
import re
import resource
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.config import JOB_SETTINGS

_LAST_LINE = re.compile(rb"finished after ([\d.]+) s; largest process (\d+) MB\s*\Z")
_LONGEST = 100  # bytes of the line
_STARTED = time.monotonic()  # imports of this module come first in every command


class JobTime(NamedTuple):
    """What a log says of its command."""

    seconds: float
    """From the start of the process."""
    memory_mb: int
    """Largest resident set of one of its processes."""
    ended: float
    """Unix time."""


def finish() -> None:
    """Write the line if this process is a job of the workflow whose output goes to a log."""
    if JOB_SETTINGS not in os.environ:
        return
    try:
        out, err = os.fstat(1), os.fstat(2)
    except OSError:  # closed
        return
    if not stat.S_ISREG(out.st_mode) or (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino):
        return
    seconds = time.monotonic() - _STARTED
    peak = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    with suppress(OSError):  # a full disk: the work is done all the same
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"finished after {seconds:.1f} s; largest process {peak / 1e6:.0f} MB\n".encode())


def read(path: Path) -> JobTime | None:
    """The time of a log; None if its command has not ended, or failed."""
    with path.open("rb") as log:
        facts = os.fstat(log.fileno())
        log.seek(max(0, facts.st_size - _LONGEST))
        found = _LAST_LINE.search(log.read())
    return JobTime(float(found[1]), int(found[2]), facts.st_mtime) if found else None
