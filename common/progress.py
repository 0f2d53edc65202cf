"""A progress bar on a terminal, a line every 30 seconds in a batch log; both on stderr."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_INTERVAL = 30.0  # seconds between two lines in a batch log


class Meter:
    """Counts items of one step.

    with Meter("clean", "documents") as meter:
        meter.advance()
    """

    def __init__(self, label: str, unit: str, total: int | None = None) -> None:
        self.label, self.unit, self.total = label, unit, total
        self.done = 0
        self._started = self._logged = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> "Meter":
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
            )
            self._task = self._bar.add_task(f"{self.label} ({self.unit})", total=self.total)
            self._bar.start()
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more items; `note` is appended to the next log line."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._logged >= LOG_INTERVAL:
            self._logged = time.monotonic()
            self._log(note)

    def _log(self, note: str) -> None:
        seconds = time.monotonic() - self._started
        rate = self.done / max(seconds, 1e-9)
        of = f"/{self.total}" if self.total is not None else ""
        left = f", {(self.total - self.done) / rate:.0f} s left" if self.total and rate else ""
        extra = f"; {note}" if note else ""
        print(f"{self.label}: {self.done}{of} {self.unit}, {rate:.1f}/s{left}{extra}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
