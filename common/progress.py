"""Progress on stderr: a bar on a terminal, a line every 10 seconds in a log.

Snakemake shows the progress of its jobs from their logs. `--quiet` sets the environment variable
URLS_TO_GPT2_QUIET, which child processes inherit; set by hand, it silences all jobs of a Snakemake.
"""

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock, Thread

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from common.console import is_quiet
from common.job_log import last_lines

LOG_INTERVAL = 10.0  # seconds between two lines in a log
_BAR_INTERVAL = 1.0  # seconds between two updates of the rates on a terminal
_WINDOW = 30.0  # seconds over which rates are averaged
_LOGS = 32  # of a step that are read at a time
_BAR = 12  # columns of a step's bar
_SHARE = re.compile(r"(?<=\s)(\d+)/([1-9]\d*)(?=[\s,])")  # in the line of a meter or a training
_LEFT = re.compile(r", ((?:\d+ days?, )?\d+:\d\d:\d\d) left\b")  # there, too


class Meter:
    """Counts the items of a step; thread-safe. Rates ignore the first `done`, of an earlier run.

    with Meter("clean", "documents") as meter:
        meter.advance()

    `lines=False`: only a bar, for a command with its own log lines. With the `size` of all items in
    bytes, which differ, the remaining time is that of the bytes.
    """

    def __init__(
        self, label: str, unit: str, total: int | None = None, done: int = 0, *, lines: bool = True, size: int = 0
    ) -> None:
        self.label, self.unit, self.total, self.done, self._size = label, unit, total, done, size
        self._lines = lines and not is_quiet()
        self._bytes = 0
        self._note = ""
        self._bar: Progress | None = None
        self._lock = Lock()

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
        # (time, items, bytes) of the last updates; rates are computed since the oldest
        self._samples = deque([(time.monotonic(), self.done, 0)], maxlen=round(_WINDOW / self._interval))
        return self

    def advance(self, count: int = 1, size: int = 0, note: str = "") -> None:
        """Count `count` more items of `size` bytes in total; `note` is shown until it is replaced.

        Call it with a count of 0 while waiting, so that the log line still appears.
        """
        with self._lock:
            self.done += count
            self._bytes += size
            self._note = note or self._note
            if self._bar is not None and count:
                self._bar.update(self._task, completed=self.done)
            now = time.monotonic()
            if now - self._samples[-1][0] >= self._interval:
                self._show(now)

    def note(self, text: str) -> None:
        """Show a note without waiting for the next `advance`; in a log, only after a first line."""
        self._note = text
        if self._bar is not None or len(self._samples) > 1:
            self._show(time.monotonic())

    def _show(self, now: float) -> None:
        """Show the rates since the oldest sample, the remaining time at that rate, and the note."""
        then, done, size = self._samples[0]
        self._samples.append((now, self.done, self._bytes))
        seconds = max(now - then, 1e-3)
        rate = (self.done - done) / seconds
        figures = f"{rate:.1f}/s"
        if self._bytes:
            figures += f", {(self._bytes - size) / seconds / 1e6:.2f} MB/s"
        left, speed = (self.total or 0) - self.done, rate
        if self._size:
            left, speed = self._size - self._bytes, (self._bytes - size) / seconds
        if left > 0 and speed:
            figures += f", {timedelta(seconds=round(left / speed))} left"
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


@dataclass(frozen=True)
class Running:
    """A step of a DAG that has running jobs."""

    name: str
    finished: int
    jobs: int
    """Finished, running and waiting ones."""
    logs: Sequence[Path]
    """Of the running jobs."""

    def poll(self) -> tuple[float, str, str]:
        """The jobs done, with fractions of running ones, and the newest last line of their logs.

        The time left that the line names is taken out; it is returned if the step has one job.
        """
        done, line, newest = float(self.finished), "", 0.0
        for path in self.logs[:_LOGS]:
            with suppress(OSError):
                (*_, last), written = last_lines(path)
                if share := _SHARE.search(last):
                    done += min(1.0, int(share[1]) / int(share[2]))
                if last and written >= newest:
                    line, newest = last.removeprefix(f"{self.name}: "), written
        left = _LEFT.search(line)
        return done, _LEFT.sub("", line), left[1] if left and self.jobs == 1 else ""


class _TimeLeft(TimeRemainingColumn):
    """The time left that a step's only job names, else an estimate from the pace of all jobs."""

    def render(self, task: Task) -> Text:
        """`0:02:01 left`; empty if it is not known."""
        left = task.fields["left"] or super().render(task).plain
        return Text(f"{left} left" if left[:1].isdigit() else "", style="progress.remaining")


@contextmanager
def watch(poll: Callable[[], Sequence[Running]]) -> Iterator[None]:
    """Show a bar for each step that `poll()` returns until the block ends; on a terminal only.

    Output to sys.stderr appears above the bars.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield
        return
    line = TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    bars = Progress(
        *(TextColumn("{task.description}"), BarColumn(_BAR), TimeElapsedColumn(), _TimeLeft(), line),
        console=Console(stderr=True, soft_wrap=True),  # the terminal wraps long lines, so that they can be copied
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        expand=True,
    )
    ended, tasks = Event(), dict[str, TaskID]()

    def draw() -> None:
        while not ended.wait(_BAR_INTERVAL):
            steps = poll()
            for finished in tasks.keys() - {step.name for step in steps}:
                bars.remove_task(tasks.pop(finished))
            for step in steps:
                done, line, left = step.poll()
                if step.name not in tasks:
                    tasks[step.name] = bars.add_task(step.name, total=None, line="", left="")
                line = f"{step.finished}/{step.jobs} jobs  {line}" if step.jobs > 1 else line
                total = step.jobs if done else None  # None changes nothing: at first the bar only says that it runs
                bars.update(tasks[step.name], total=total, completed=done, line=line, left=left)

    thread = Thread(target=draw, daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Ticker:
    """Prints a line every 10 seconds, and at once what is new, for a command that waits."""

    def __init__(self) -> None:
        self._printed, self._news = time.monotonic(), ""

    def show(self, line: Callable[[], str], news: str = "") -> None:
        """Print `line()` on stdout if it is due, or if `news` is another than at the last call."""
        due = time.monotonic() - self._printed >= LOG_INTERVAL or news != self._news
        self._news = news
        if due and not is_quiet():
            self._printed = time.monotonic()
            print(line(), flush=True)
