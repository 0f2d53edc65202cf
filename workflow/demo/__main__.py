"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m workflow.demo

Runs `snakemake all` on config.yaml in the current folder with a line per finished job, then prints a summary: what each
step kept, the loss, a generated text, where the results are and what to try next. Finished work is not repeated.
"""

import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO

from common import cli
from common.config import load_settings
from common.console import say
from common.errors import ToolkitError
from common.progress import Running
from workflow.demo.summary import summary

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
_STARTED = re.compile(r"(?:local)?rule (\w+):")
_FINISHED = re.compile(r"Finished jobid: \d+ \(Rule: (\w+)\)")
_PROGRESS = re.compile(r"(\d+ of \d+) steps .*done")
_SILENCE = 10  # seconds after which a line says what is running
_TAIL = 60  # lines of Snakemake's output that are shown if it fails


def run_snakemake(logs: Path) -> None:
    """Run `snakemake all` with a line per finished job; `logs` has the logs of its jobs.

    Raises ToolkitError, after the end of its output, if it fails. Snakemake keeps the whole output in .snakemake/log.
    """
    last: deque[str] = deque(maxlen=_TAIL)
    command = [*SNAKEMAKE, "all", "--quiet", "reason", "host"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            _show_progress(process.stdout, last, logs)
        except BaseException:
            process.terminate()  # Snakemake stops its jobs
            raise
    if process.returncode:
        say("".join(last))
        raise ToolkitError(
            f"snakemake stopped with exit code {process.returncode}; its last lines, with the failed step's log, are"
            " above, and all of them in the newest file of .snakemake/log"
        )


def _show_progress(output: IO[str], last: deque[str], logs: Path) -> None:
    """Print a line per finished job, and every 10 seconds what is running; all lines go to `last`."""
    started, rule, running = time.monotonic(), "", Counter[str]()
    lines = Queue[str]()

    def clock() -> str:
        seconds = int(time.monotonic() - started)
        return f"{seconds // 60:3}:{seconds % 60:02}"

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_SILENCE)
        except Empty:
            for waiting in +running:
                say(f"{clock()}  {waiting}: {_last_line(logs, waiting)}")
            continue
        if not line:
            return
        last.append(line)
        if finished := _FINISHED.match(line):
            rule = finished[1]
            running[rule] -= 1
        elif progress := _PROGRESS.match(line):
            say(f"{clock()}  {progress[1]:>8}  {rule}")
        elif begun := _STARTED.match(line):
            running[begun[1]] += 1
        elif line.startswith("Nothing to be done"):
            say(line.strip())


def _last_line(logs: Path, rule: str) -> str:
    """The last line of a rule's newest log."""
    return Running(rule, 0, 1, [*logs.glob(f"{rule}.log"), *logs.glob(f"{rule}/*.log")]).poll()[1] or "running"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("workflow.demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    run_snakemake(settings.run / "logs")
    print(f"\n{summary(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
