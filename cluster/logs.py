"""Print the log of a training job, over all its restarts, and follow it.

    python -m cluster.logs results/demo/models/tiny --lines 20
    python -m cluster.logs results/demo/models/tiny --rank 0 --follow

Each rank has one file per job, MODEL_FOLDER/logs/JOB_RANK_log.out, to which every restart appends.
`--follow` ends with the job.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.jobs import FINAL, Job, current_state, log_path, query_jobs, read_job, require_folder, states
from common import cli
from common.console import note
from common.errors import InputError


def _print(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def follow(folder: Path, job: Job, path: Path, position: int) -> None:
    """Print what is appended to a log after `position`, until the job has ended."""
    reported = ""
    for state, _ in states(folder, job):  # before the last lines are read
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                _print(file.read())
                position = file.tell()
        if (state.state in FINAL or not path.exists()) and reported != str(state):
            reported = str(state)
            note(f"{folder.name}: job {job.id} {reported}")
        if state.state in FINAL:
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.logs", __doc__)
    parser.add_argument("folder", type=cli.input_path, metavar="MODEL_FOLDER", help="model folder of the job")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="process of the job (default 0)")
    parser.add_argument("--lines", type=cli.positive_int, metavar="N", help="the last N lines (default: all)")
    parser.add_argument("--follow", action="store_true", help="print new lines until the job ends")
    arguments = parser.parse_args(argv)
    folder = require_folder(arguments.folder)
    job = read_job(folder)
    if job is None:
        raise InputError(f"{folder}: no job was submitted for it; start one with python -m cluster.submit")
    path = log_path(job, arguments.rank)
    if not path.exists() and not arguments.follow:
        ranks = [int(log.name.split("_")[-2]) for log in path.parent.glob(f"{job.id}_*_log.out")]
        has = f"; the ranks with a log are 0 to {max(ranks)}" if ranks else ""
        state = current_state(folder, job, query_jobs([job]).get(job.id))
        raise InputError(f"{path}: no log yet, job {job.id} is {state}{has}")
    text = path.read_bytes() if path.exists() else b""
    lines = text.splitlines(keepends=True)
    try:
        _print(b"".join(lines[-arguments.lines :] if arguments.lines else lines))
        if arguments.follow:
            follow(folder, job, path, len(text))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
