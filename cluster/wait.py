"""Waits for a training job over its restarts, and says how it ended.

Ctrl-C ends the waiting for a Slurm job. A job on this machine is stopped, with a checkpoint: whoever interrupts it in
the foreground, as Snakemake does, expects its processors back.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from cluster import slurm, submission
from cluster.job_end import requeue_dead
from cluster.jobs import FINAL, Job, State, current_state, log_tail, look, read_state, write_state
from cluster.slurm import QueuedJob
from cluster.training_status import total_iterations
from common.console import note
from common.errors import JobError
from common.progress import Ticker
from training.monitoring.heartbeat import progress_of

POLL = {"local": 0.5, "slurm": 5.0}
"""Seconds between two looks at a job, by executor."""
_LAG = 20.0  # seconds for a job's last files to appear on a network file system


def wait(name: str, folder: Path, job: Job, max_restarts: int, terminal: int | None = None) -> None:
    """Wait for the job of a model folder; print every 30 s how far it is, to the descriptor `terminal`, too.

    Raises JobError if the job did not finish, and if it waits for something that will not come (it is cancelled then).
    """
    try:
        _follow(name, folder, job, max_restarts, Ticker(terminal))
    except (KeyboardInterrupt, SystemExit):  # the latter for SIGTERM and SIGHUP
        if job.executor == "local":
            _stop_here(folder, job)
        raise


def _stop_here(folder: Path, job: Job) -> None:
    """Let a job on this machine save and stop; a second Ctrl-C kills it."""
    print("\nfinishing the step, then saving; Ctrl-C again to leave at once", file=sys.stderr, flush=True)
    try:
        submission.stop_here(job.id)
        while look([job]):
            time.sleep(POLL["local"])
    except KeyboardInterrupt:
        submission.kill_here(job.id)
    state = current_state(folder, job, {})
    if state.state != "finished":
        write_state(folder, replace(state, state="cancelled", reason="interrupted"))


def _follow(name: str, folder: Path, job: Job, max_restarts: int, ticker: Ticker) -> None:
    silent = False
    while True:
        known = look([job])
        if known is None and not silent:
            note(f"{name}: the Slurm controller does not answer; still waiting")
        silent = known is None
        state = current_state(folder, job, known)
        if known is not None:
            state = _cancel_hopeless(folder, job, state, known)
            if state.state in FINAL and job.executor == "slurm":
                state = _settle(folder, job, max_restarts)
        if state.state in FINAL:
            if job.executor == "local" and state != read_state(folder, job):
                write_state(folder, state)  # a Slurm job does it itself
            return _report(name, folder, job, state)
        time.sleep(POLL[job.executor])
        ticker.show(partial(progress, name, folder, job, state))


def progress(name: str, folder: Path, job: Job, state: State) -> str:
    """One line on a job: its state, and how far its training is."""
    line, last = f"{name}: job {job.id} {describe(state)}", progress_of(folder)
    if not last or state.state != "running":
        return line
    done = f"iteration {last['done']}/{total_iterations(folder, job) or '?'}"
    return f"{line} | {done}, loss {last['loss']:.4f}, {timedelta(seconds=last['seconds_left'])} left"


def describe(state: State) -> str:
    """A state with its reason and the number of restarts."""
    restarts = f" (restarts: {state.restarts})" if state.restarts else ""
    return f"{state.state}{f': {state.reason}' if state.reason not in ('', 'None') else ''}{restarts}"


def _cancel_hopeless(folder: Path, job: Job, state: State, known: Mapping[str, QueuedJob]) -> State:
    """Cancel a job that waits for something that will not come."""
    if job.id not in known or not known[job.id].hopeless:
        return state
    slurm.cancel([job.id])
    state = replace(state, state="failed", reason=slurm.never_starts(known[job.id]))
    write_state(folder, state)
    return state


def _settle(folder: Path, job: Job, max_restarts: int) -> State:
    """The state of a job that Slurm has ended, once its last files are visible; it may be requeued from here."""
    deadline = time.monotonic() + _LAG
    while True:
        recorded = read_state(folder, job)
        if recorded is not None and recorded.state in FINAL:
            return recorded
        known = look([job])
        if known is not None:
            state = current_state(folder, job, known)
            if state.state not in FINAL or state.state == "finished":
                return state
            if time.monotonic() > deadline:
                return requeue_dead(folder, job, state, max_restarts)
        time.sleep(1)


def _report(name: str, folder: Path, job: Job, state: State) -> None:
    """Say that the job finished; raises JobError with the end of its log if it did not."""
    if state.state == "finished":
        print(f"{name}: done, {folder / 'done.json'}")
        return
    if state.state == "cancelled":
        raise JobError(f"{name}: job {job.id} {describe(state)}; python -m cluster.submit starts it again")
    path, lines = log_tail(job)
    quoted = "".join(f"\n    {line}" for line in lines)
    raise JobError(f"{name}: job {job.id} {describe(state)}; log: {path or job.logs}{quoted}")
