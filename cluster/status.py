"""What the training runs are doing: job, state, iteration, loss.

    python -m cluster.status
    python -m cluster.status results/demo/models/tiny

Without an argument: every run below results/.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.jobs import is_alive, read_job
from common import cli
from common.errors import InputError
from common.files import read_json, read_rows


def run_status(run: Path) -> list[str]:
    """Run, job, state, iteration and last loss of one run folder, as text."""
    job = read_job(run)
    done = run / "done.json"
    state = "done" if done.exists() else "no job" if job is None else "alive" if is_alive(job) else "ended early"
    iteration = loss = "-"
    if rows := read_rows(run / "train.csv"):
        iteration, loss = rows[-1]["iteration"], rows[-1]["lm_loss"]
    if done.exists():
        iteration = str(read_json(done)["iteration"])
    return [str(run), job.id if job else "-", state, iteration, loss]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.status", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default results/*/models/*)")
    arguments = parser.parse_args(argv)
    for run in arguments.runs:
        if not run.is_dir():
            raise InputError(f"{run}: no such run folder")
    runs = arguments.runs or sorted(path for path in Path("results").glob("*/models/*") if path.is_dir())
    if not runs:
        raise InputError("results/*/models/*: no run yet; submit one with python -m cluster.submit")
    rows = [["run", "job", "state", "iteration", "loss"], *map(run_status, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
