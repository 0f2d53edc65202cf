"""Print the log of a training job, over all its restarts, and follow it.

    python -m cluster.logs results/demo/models/tiny --lines 20
    python -m cluster.logs results/demo/models/tiny --rank 0 --follow

Each rank has one file per job, MODEL_FOLDER/logs/JOB_RANK_log.out, to which every restart appends. `--all` prints the
files of earlier jobs first. `--follow` ends with the job.
"""

import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from cluster.jobs import FINAL, Job, current_state, log_path, look, read_job, require_folder
from cluster.wait import POLL, describe
from common import cli
from common.console import note
from common.errors import InputError

_NAME = re.compile(r"(?P<job>\w+)_(?P<rank>\d+)_log\.out")
_PAUSE = 0.5  # seconds between two looks at a log that grows


def log_files(job: Job, rank: int, earlier: bool) -> list[Path]:
    """The log of one rank of a job; with `earlier`, those of earlier jobs before it, oldest first."""
    newest = log_path(job, rank)
    matches = ((path, _NAME.fullmatch(path.name)) for path in Path(job.logs).glob(f"*_{rank}_log.out"))
    found = [path for path, match in matches if match and int(match["rank"]) == rank and path != newest]
    older = sorted(found, key=lambda path: path.stat().st_mtime) if earlier else []
    return [*older, *[newest] * newest.exists()]


def _headed(path: Path) -> Iterable[bytes]:
    yield f"==> {path} <==\n".encode()
    with path.open("rb") as file:
        yield from file


def _print(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def print_logs(paths: Sequence[Path], lines: int | None) -> int:
    """Print the last `lines` lines of some files, or all; with several files, each below a line that names it.

    Returns how many bytes of the last file were read.
    """
    if not paths:
        return 0
    sys.stdout.flush()
    with paths[-1].open("rb") as newest:
        head = [f"==> {paths[-1]} <==\n".encode()] if len(paths) > 1 else []
        every = chain(*map(_headed, paths[:-1]), head, newest)
        _print(every if lines is None else deque(every, maxlen=lines))
        return newest.tell()


def follow(folder: Path, job: Job, path: Path, position: int) -> None:
    """Print what is appended to a log after `position`, until the job has ended."""
    file: IO[bytes] | None = None
    looked, ended, told = 0.0, False, ""
    try:
        while True:
            if file is None and path.exists():
                file = path.open("rb")
                file.seek(position)
            if file is not None:
                _print(file)
            if ended:
                return
            if time.monotonic() - looked >= POLL[job.executor]:
                state = current_state(folder, job, look([job]))
                looked, ended = time.monotonic(), state.state in FINAL
                if ended or (file is None and told != describe(state)):
                    told = describe(state)
                    note(f"{folder.name}: job {job.id} {told}")
            if ended:
                time.sleep(_PAUSE)  # its last lines
                continue
            time.sleep(_PAUSE)
    finally:
        if file is not None:
            file.close()


def _no_log(folder: Path, job: Job, rank: int) -> InputError:
    """The error for a log that does not exist."""
    state = describe(current_state(folder, job, look([job])))
    ranks = [int(match["rank"]) for path in Path(job.logs).glob(f"{job.id}_*") if (match := _NAME.fullmatch(path.name))]
    has = f"; the ranks with a log are 0 to {max(ranks)}" if ranks else ""
    return InputError(f"{log_path(job, rank)}: no log yet, job {job.id} is {state}{has}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.logs", __doc__)
    parser.add_argument("folder", type=cli.input_path, metavar="MODEL_FOLDER", help="model folder of the job")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="process of the job (default 0)")
    parser.add_argument("--lines", type=cli.positive_int, metavar="N", help="the last N lines (default: all)")
    parser.add_argument("--all", action="store_true", help="logs of earlier jobs of the model folder, too")
    parser.add_argument("--follow", action="store_true", help="print new lines until the job ends")
    arguments = parser.parse_args(argv)
    folder, rank = require_folder(arguments.folder), arguments.rank
    job = read_job(folder)
    if job is None:
        raise InputError(f"{folder}: no job was submitted for it; start one with python -m cluster.submit")
    paths = log_files(job, rank, arguments.all)
    if not paths and not arguments.follow:
        raise _no_log(folder, job, rank)
    try:
        position = print_logs(paths, arguments.lines)
        if arguments.follow:
            newest = log_path(job, rank)
            follow(folder, job, newest, position if newest in paths else 0)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
