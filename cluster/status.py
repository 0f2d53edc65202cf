"""What the training runs are doing: job, state, iteration, losses, speed.

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
from common.tables import text_table

COLUMNS = ("run", "job", "state", "iteration", "loss", "valid loss", "tokens/s", "MFU (%)")


def run_status(run: Path) -> list[str]:
    """COLUMNS of one run folder, as text."""
    job = read_job(run)
    done = run / "done.json"
    state = "done" if done.exists() else "no job" if job is None else "alive" if is_alive(job) else "ended early"
    train, valid = ((read_rows(run / f"{name}.csv") or [{}])[-1] for name in ("train", "valid"))
    iteration = str(read_json(done)["iteration"]) if done.exists() else train.get("iteration", "-")
    figures = (
        _figure(train.get("lm_loss"), ".4f"),
        _figure(valid.get("loss"), ".4f"),
        _figure(train.get("tokens_per_second"), ".0f"),
        _figure(train.get("mfu"), ".2%").rstrip("%"),
    )
    return [str(run), job.id if job else "-", state, iteration, *figures]


def _figure(cell: str | None, form: str) -> str:
    """A cell of a curve for people; `-` where it is empty or absent."""
    return format(float(cell), form) if cell else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.status", __doc__)
    parser.add_argument(
        "runs", nargs="*", type=cli.input_path, metavar="RUN", help="run folders (default results/*/models/*)"
    )
    arguments = parser.parse_args(argv)
    for run in arguments.runs:
        if not run.is_dir():
            raise InputError(f"{run}: no such run folder")
    runs = arguments.runs or sorted(path for path in Path("results").glob("*/models/*") if path.is_dir())
    if not runs:
        raise InputError("results/*/models/*: no run yet; submit one with python -m cluster.submit")
    print(text_table([COLUMNS, *map(run_status, runs)]))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
