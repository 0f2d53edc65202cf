"""Run the whole toolkit on the embedded site; `make demo` installs everything and runs this.

    python -m demo

Runs `snakemake all` on config.yaml in the current folder with a line per finished job, then prints a summary: what each
step kept, the loss, a generated text, where the results are and what to try next. Finished work is not repeated.
"""

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from common import cli
from common.config import load_settings
from common.console import say
from common.errors import ToolkitError
from demo.summary import summary

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
_STARTED = re.compile(r"(?:local)?rule (\w+):")
_FINISHED = re.compile(r"Finished jobid: \d+ \(Rule: (\w+)\)")
_PROGRESS = re.compile(r"(\d+ of \d+) steps .*done")
_TAIL = 60  # lines of Snakemake's output that are shown if it fails


def run_snakemake() -> None:
    """Run `snakemake all` with a line per finished job. Raises ToolkitError, after the end of its output, if it fails.

    Snakemake keeps the whole output in .snakemake/log.
    """
    last: deque[str] = deque(maxlen=_TAIL)
    command = [*SNAKEMAKE, "all", "--quiet", "reason", "host"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            _show_progress(process.stdout, last)
        except BaseException:
            process.terminate()  # Snakemake stops its jobs
            raise
    if process.returncode:
        say("".join(last))
        raise ToolkitError(
            f"snakemake stopped with exit code {process.returncode}; its last lines, with the failed step's log, are"
            " above, and all of them in the newest file of .snakemake/log"
        )


def _show_progress(lines: IO[str] | None, last: deque[str]) -> None:
    """Print a line per finished job; all lines go to `last`."""
    started, rule = time.monotonic(), ""
    for line in lines or ():
        last.append(line)
        if finished := _FINISHED.match(line):
            rule = finished[1]
        elif progress := _PROGRESS.match(line):
            seconds = int(time.monotonic() - started)
            say(f"{seconds // 60:3}:{seconds % 60:02}  {progress[1]:>8}  {rule}")
        elif (begun := _STARTED.match(line)) and begun[1] == "train":
            say("        training; it takes most of the time (its log: logs/train in the run's folder)")
        elif line.startswith("Nothing to be done"):
            say(line.strip())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("demo", __doc__).parse_args(argv)
    settings = load_settings(Path("config.yaml"))
    run_snakemake()
    print(f"\n{summary(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
