"""A progress bar on a terminal, a line every 30 seconds in a batch log; both on stderr."""

import sys
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

LOG_INTERVAL = 30.0  # seconds between two lines in a batch log
_BAR_INTERVAL = 1.0  # seconds between two looks at the rates on a terminal
_WINDOW = 30.0  # seconds that rates are taken over


class _Bar(Progress):
    """A bar with a line of figures below."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, ten times a second."""
        yield from super().get_renderables()
        yield Text(self.figures, no_wrap=True, overflow="ellipsis")


class Meter:
    """Counts items of one step; `done` of them were finished by an earlier run and count for no rate.

    with Meter("clean", "documents") as meter:
        meter.advance()
    """

    def __init__(self, label: str, unit: str, total: int | None = None, done: int = 0) -> None:
        self.label, self.unit, self.total, self.done = label, unit, total, done
        self._bytes = 0
        self._note = ""
        self._bar: _Bar | None = None

    def __enter__(self) -> "Meter":
        self._interval = LOG_INTERVAL
        if sys.stderr.isatty():
            self._interval = _BAR_INTERVAL
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = _Bar(
                *columns,
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # lines appear above the bar, but never leave a file for it
            )
            self._task = self._bar.add_task(f"{self.label} ({self.unit})", total=self.total, completed=self.done)
            self._bar.start()
        # (time, items, bytes) at the last looks: rates are over the time since the oldest of them
        self._looks = deque([(time.monotonic(), self.done, 0)], maxlen=round(_WINDOW / self._interval))
        return self

    def advance(self, count: int = 1, size: int = 0, note: str = "") -> None:
        """Count `count` more items of `size` bytes in all. `note` is shown after the figures until the next one.

        With a count of 0 it only lets time pass: a step that waits goes on reporting.
        """
        self.done += count
        self._bytes += size
        self._note = note or self._note
        if self._bar is not None and count:
            self._bar.update(self._task, completed=self.done)
        now = time.monotonic()
        if now - self._looks[-1][0] >= self._interval:
            self._show(now)

    def _show(self, now: float) -> None:
        """The rates since the oldest look, what is left at that rate, and the note."""
        then, done, size = self._looks[0]
        self._looks.append((now, self.done, self._bytes))
        rate = (self.done - done) / (now - then)
        figures = f"{rate:.1f}/s"
        if self._bytes:
            figures += f", {(self._bytes - size) / (now - then) / 1e6:.2f} MB/s"
        if self.total and rate:
            figures += f", {timedelta(seconds=round((self.total - self.done) / rate))} left"
        if self._note:
            figures += f"; {self._note}"
        if self._bar is not None:
            self._bar.figures = figures
            return
        of = f"/{self.total}" if self.total is not None else ""
        print(f"{self.label}: {self.done}{of} {self.unit}, {figures}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
