"""Progress on stderr: a bar on a terminal, a line every 30 seconds in a batch log, nothing with `--quiet`.

Every command shows its progress with these functions. `--quiet` sets the environment variable URLS_TO_GPT2_QUIET, which
the processes that a command starts inherit; set by hand, it silences all jobs of a Snakemake.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.console import is_quiet

LOG_INTERVAL = 30.0  # seconds between two lines in a batch log
_BAR_INTERVAL = 1.0  # seconds between two updates of the rates on a terminal
_WINDOW = 30.0  # seconds over which rates are averaged


class Meter:
    """Counts the items of one step. The first `done` were finished by an earlier run and do not count for rates.

    with Meter("clean", "documents") as meter:
        meter.advance()

    `lines=False`: only a bar, for a command that has log lines of its own.
    """

    def __init__(self, label: str, unit: str, total: int | None = None, done: int = 0, *, lines: bool = True) -> None:
        self.label, self.unit, self.total, self.done = label, unit, total, done
        self._lines = lines and not is_quiet()
        self._bytes = 0
        self._note = ""
        self._bar: Progress | None = None

    def __enter__(self) -> "Meter":
        self._interval = LOG_INTERVAL
        if sys.stderr.isatty() and not is_quiet():
            self._interval = _BAR_INTERVAL
            names, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
            self._bar = Progress(
                *(names, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), figures),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # printed lines appear above the bar
            )
            name = f"{self.label} ({self.unit})"
            self._task = self._bar.add_task(name, total=self.total, completed=self.done, figures="")
            self._bar.start()
        # (time, items, bytes) at the last updates: rates are computed since the oldest of them
        self._samples = deque([(time.monotonic(), self.done, 0)], maxlen=round(_WINDOW / self._interval))
        return self

    def advance(self, count: int = 1, size: int = 0, note: str = "") -> None:
        """Count `count` more items with `size` bytes in total. `note` is shown after the figures until it is replaced.

        Call it with a count of 0 while waiting, so that the log line still appears.
        """
        self.done += count
        self._bytes += size
        self._note = note or self._note
        if self._bar is not None and count:
            self._bar.update(self._task, completed=self.done)
        now = time.monotonic()
        if now - self._samples[-1][0] >= self._interval:
            self._show(now)

    def _show(self, now: float) -> None:
        """Show the rates since the oldest sample, the remaining time at that rate, and the note."""
        then, done, size = self._samples[0]
        self._samples.append((now, self.done, self._bytes))
        rate = (self.done - done) / (now - then)
        figures = f"{rate:.1f}/s"
        if self._bytes:
            figures += f", {(self._bytes - size) / (now - then) / 1e6:.2f} MB/s"
        if self.total and rate:
            figures += f", {timedelta(seconds=round((self.total - self.done) / rate))} left"
        if self._note:
            figures += f"; {self._note}"
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
        elif self._lines:
            of = f"/{self.total}" if self.total is not None else ""
            print(f"{self.label}: {self.done}{of} {self.unit}, {figures}", file=sys.stderr, flush=True)

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def count_bytes(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` bytes: yields a function that any thread calls with a number of bytes."""
    lock = Lock()
    with Meter(label, "bytes", total) as meter:

        def advance(count: int) -> None:
            with lock:
                meter.advance(count, count)

        yield advance


class Ticker:
    """Prints a line at most every 30 seconds, for a command that waits for something else to advance.

    `terminal`: a descriptor that gets the lines, too.
    """

    def __init__(self, terminal: int | None = None) -> None:
        self._terminal = terminal
        self._printed = time.monotonic()

    def show(self, line: Callable[[], str]) -> None:
        """Print `line()` on stdout if it is due."""
        if time.monotonic() - self._printed >= LOG_INTERVAL and not is_quiet():
            self._printed = time.monotonic()
            text = line()
            print(text, flush=True)
            if self._terminal is not None:
                with suppress(OSError):  # it was closed
                    os.write(self._terminal, f"{text}\n".encode())
