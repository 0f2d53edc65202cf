"""Messages for people: lines and tables on stdout; notes, warnings and errors on stderr."""

import os
import sys
from collections.abc import Iterable, Sequence

from common.errors import ToolkitError

QUIET = "URLS_TO_GPT2_QUIET"
"""The environment variable that turns progress off, unless it is empty or 0."""


def is_quiet() -> bool:
    """Whether progress is turned off."""
    return os.environ.get(QUIET, "") not in ("", "0")


def say(text: str) -> None:
    """Print a line and flush it; a closed pipe (`| head`) or a full disk stops no job."""
    try:
        print(f"{text}\n", end="", flush=True)  # a single write: several threads print
    except OSError:
        discard(sys.stdout.fileno())


def note(text: str) -> None:
    """Print a note to stderr."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def fail(error: Exception) -> int:
    """Print an error to stderr in one line; returns its exit code."""
    text = str(error)
    if isinstance(error, OSError):
        text = (f"{error.filename}: " if error.filename else "") + (error.strerror or text)
    print(f"error: {text}", file=sys.stderr)
    return error.exit_code if isinstance(error, ToolkitError) else 2


def discard(descriptor: int) -> None:
    """Redirect a descriptor without a reader to /dev/null: Python flushes its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def text_table(rows: Iterable[Sequence[object]], align: str = "") -> str:
    """Rows of cells as lines. `align` has `l` (the default) or `r` per column."""
    from tabulate import tabulate  # takes a tenth of a second

    lines = list(rows)
    columns = max(map(len, lines), default=0)
    sides = ["right" if side == "r" else "left" for side in align.ljust(columns, "l")]
    # the widths are computed on text: numbers are formatted by the caller
    text = tabulate(lines, tablefmt="plain", colalign=sides[:columns], disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def readable_bytes(number: float) -> str:
    """`14.75 GiB`, `3.2 MiB`."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
