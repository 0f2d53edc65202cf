"""Waits for a training job over its restarts, and says how it ended.

Ctrl-C ends the waiting for a Slurm job. A job on this machine is stopped, with a checkpoint: whoever interrupts it in
the foreground, as Snakemake does, expects its processors back.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster import slurm
from cluster.cancel import cancel
from cluster.job_end import requeue_dead
from cluster.jobs import FINAL, Job, State, log_tail, progress, states, write_state
from common.errors import JobError
from common.progress import Ticker

_LAG = 20.0  # seconds for a job's last files to appear on a network file system


def wait(name: str, folder: Path, job: Job, max_restarts: int) -> None:
    """Wait for the job of a model folder; print every 10 s how far it is.

    Raises JobError if the job did not finish, and if it waits for something that will not come (it is cancelled then).
    """
    try:
        state = _final_state(folder, job, max_restarts, Ticker())
    except (KeyboardInterrupt, SystemExit):  # the latter for SIGTERM and SIGHUP
        if job.executor == "local":
            print("\nfinishing the step, then saving; Ctrl-C again to exit at once", file=sys.stderr, flush=True)
            try:
                cancel(folder, job)
            except KeyboardInterrupt:
                cancel(folder, job, now=True)
        raise
    if state.state == "finished":
        print(f"{name}: done, {folder / 'done.json'}")
        return
    if state.state == "cancelled":
        raise JobError(f"{name}: job {job.id} {state}; python -m cluster.submit starts it again")
    path, lines = log_tail(job)
    quoted = "".join(f"\n    {line}" for line in lines if line.removeprefix("error: ") != state.reason)
    raise JobError(f"{name}: job {job.id} {state}; log: {path if path.exists() else job.logs}{quoted}")


def _final_state(folder: Path, job: Job, max_restarts: int, ticker: Ticker) -> State:
    """The state in which a job ends; recorded."""
    ended = 0.0
    for state, seen in states(folder, job):
        if seen is not None and seen.unschedulable:
            slurm.cancel([job.id])
            state = replace(state, state="failed", reason=slurm.never_starts(seen))
        elif state.state == "failed" and not state.time and job.executor == "slurm":
            # its batch script was killed before it recorded the end, or its record is not visible here yet
            ended = ended or time.monotonic()
            if time.monotonic() < ended + _LAG:
                continue
            state = requeue_dead(folder, job, state, max_restarts)
        else:
            ended = 0.0
        if state.state in FINAL:
            return state if state.time else write_state(folder, state)
        ticker.show(partial(progress, folder, job, state))
    raise AssertionError
