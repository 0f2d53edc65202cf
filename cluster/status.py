"""Show the state of training jobs: job id, state, iteration, losses, speed.

    python -m cluster.status
    python -m cluster.status results/demo/models/tiny

Without an argument it lists every model folder below results/.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.jobs import is_alive, read_job
from common import cli
from common.errors import InputError
from common.files import read_json, read_rows
from common.tables import text_table

COLUMNS = ("model folder", "job", "state", "iteration", "loss", "valid loss", "tokens/s", "MFU (%)")


def model_status(folder: Path) -> list[str]:
    """The COLUMNS of one model folder, as text."""
    job = read_job(folder)
    done = folder / "done.json"
    state = "done" if done.exists() else "no job" if job is None else "alive" if is_alive(job) else "ended early"
    train, valid = ((read_rows(folder / f"{name}.csv") or [{}])[-1] for name in ("train", "valid"))
    iteration = str(read_json(done)["iteration"]) if done.exists() else train.get("iteration", "-")
    figures = (
        _figure(train.get("lm_loss"), ".4f"),
        _figure(valid.get("loss"), ".4f"),
        _figure(train.get("tokens_per_second"), ".0f"),
        _figure(train.get("mfu"), ".2%").rstrip("%"),
    )
    return [str(folder), job.id if job else "-", state, iteration, *figures]


def _figure(cell: str | None, form: str) -> str:
    """A number from a CSV cell, formatted; `-` if the cell is empty or missing."""
    return format(float(cell), form) if cell else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.status", __doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=cli.input_path,
        metavar="MODEL_FOLDER",
        help="model folders (default results/*/models/*)",
    )
    arguments = parser.parse_args(argv)
    for folder in arguments.folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such model folder")
    folders = arguments.folders or sorted(path for path in Path("results").glob("*/models/*") if path.is_dir())
    if not folders:
        raise InputError("results/*/models/*: no model folder yet; start training with python -m cluster.submit")
    print(text_table([COLUMNS, *map(model_status, folders)]))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
