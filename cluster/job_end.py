"""Decide at the end of a Slurm job's batch script whether the job is finished, failed, or requeued.

    python -m cluster.job_end --folder results/demo/models/tiny --code 75 --max-restarts 3

Slurm itself requeues a job only if its node dies or it is preempted without grace; a job that saves
and exits would be FAILED. So the script requeues it after a time limit, a preemption or the death
of a rank, but not if a person has stopped or cancelled it, if the error needs a person, or if it
has restarted too often without a new checkpoint.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from cluster import slurm
from cluster.jobs import ASKED, Job, State, log_path, read_state, write_state
from common import cli
from common.errors import LOCK_LOST, RESUME_ME, USER_ERROR
from training.model_folder import newest_iteration, stop_file, stopped_mark

Answer = TypeVar("Answer")
_PATIENCE = 600.0  # seconds to wait for a controller that does not answer
_RETRY = 2.0
_REFUSED = "Slurm refused to requeue it"
_LOST = {"PREEMPTED": "preempted", "TIMEOUT": "time limit", "NODE_FAIL": "node failure"}
"""Slurm's states after which a job without its batch script is requeued, and our name for each."""
_MEMORY = "out of memory; raise cluster.mem_gb_per_task"
# What slurmstepd and srun print, of several versions, with cgroups and with OverMemoryKill.
_OUT_OF_MEMORY = re.compile(r"^(slurmstepd|srun).*(oom.kill|Out Of Memory|exceeded memory limit)", re.MULTILINE)


class Ended(NamedTuple):
    """The end of one start of a job."""

    code: int
    """Exit code of srun: the highest of the ranks; 128 + N after signal N."""
    restarts: int
    """How often the job had been requeued before this start."""
    slurm: Mapping[str, str]
    """`scontrol show job`."""
    newest: int
    """Iteration of the newest checkpoint."""
    stopped: bool
    """Whether a person asked it to stop."""
    log: str = ""
    """What Slurm and rank 0 printed."""


def decide(end: Ended, before: State, max_restarts: int) -> State | None:
    """The state of the job from now on; None if Slurm has requeued it already."""
    if int(end.slurm.get("Restarts", end.restarts)) != end.restarts:
        return None
    after = replace(before, restarts=end.restarts, checkpoint=end.newest)
    if end.code == 0:
        return replace(after, state="finished", reason="")
    if before.state == "cancelled":  # cluster.cancel records it before it calls scancel
        return after
    if end.stopped:
        return replace(after, state="cancelled", reason=ASKED)
    if end.code == USER_ERROR:
        return replace(after, state="failed", reason="an error that must be cured first")
    if _OUT_OF_MEMORY.search(end.log):
        return replace(after, state="failed", reason=_MEMORY)
    why = _reason(end)
    if not why:
        return replace(after, state="cancelled", reason="scancel")
    return _again(before, end.restarts, end.newest, why, max_restarts)


def _again(before: State, restarts: int, newest: int, why: str, max_restarts: int) -> State:
    """Requeued, or out of restarts after too many without a new checkpoint."""
    after = replace(before, restarts=restarts, checkpoint=newest)
    without = 0 if newest > before.checkpoint else before.restarts_without_progress + 1
    if without > max_restarts:
        reason = f"{why}; {max_restarts} restarts without a new checkpoint (cluster.max_restarts)"
        return replace(after, state="out of restarts", reason=reason)
    return replace(after, state="requeued", reason=why, restarts=restarts + 1, restarts_without_progress=without)


def _reason(end: Ended) -> str:
    """Why the job ended early; empty if a person cancelled it."""
    if "PreemptTime" in end.slurm:
        return "preempted"
    ending = end.slurm.get("JobState", "RUNNING") in ("COMPLETING", "CANCELLED", "TIMEOUT")
    # RunTime, not dates: their format is the user's
    if ending and slurm.seconds(end.slurm["RunTime"]) < slurm.seconds(end.slurm["TimeLimit"]) - 1:
        return ""
    if end.code == RESUME_ME:
        return "time limit" if ending else "time limit, or a signal"
    return f"a process died (exit code {end.code})"


def end_job(folder: Path, job: Job, code: int, restarts: int, max_restarts: int) -> int:
    """Record the end of this start, and requeue the job if it should continue.

    Returns the exit code of the batch script.
    """
    if code == LOCK_LOST:
        print("another start of this training holds the model folder; this one exits")
        return 0
    before = read_state(folder, job) or State(job.id, "running")
    newest = newest_iteration(folder)
    stopped = stop_file(folder).exists() or stopped_mark(folder).exists()  # or asked, but it died first
    details = _wait_for_answer(lambda: slurm.details(job.id)) or {} if code else {}
    path = log_path(replace(job, logs=str(folder / "logs")))
    log = path.read_text(encoding="utf-8", errors="replace") if code and path.exists() else ""
    after = decide(Ended(code, restarts, details, newest, stopped, log), before, max_restarts)
    if after is None:
        return code
    print(f"{after.state}: {after.reason}" if after.reason else after.state, flush=True)
    refuses = details.get("Requeue") == "0"  # the site's --no-requeue
    _record(folder, after, lambda: not refuses and _wait_for_answer(lambda: slurm.requeue(job.id)))
    return code


def requeue_dead(folder: Path, job: Job, state: State, max_restarts: int) -> State:
    """Requeue a job whose batch script was killed; returns the new, recorded state."""
    details = slurm.details(job.id) or {}
    why = _LOST.get(details.get("JobState", ""))
    if why is not None:
        restarts = int(details.get("Restarts", "0"))
        state = _again(state, restarts, newest_iteration(folder), why, max_restarts)
    elif details.get("JobState") == "OUT_OF_MEMORY":
        state = replace(state, reason=_MEMORY)
    return _record(folder, state, lambda: slurm.requeue(job.id))


def _record(folder: Path, state: State, requeue: Callable[[], object]) -> State:
    """Record a state, and requeue the job if it says so; returns failed if Slurm refuses."""
    state = write_state(folder, state)  # first: requeue ends this script, and the job may start and write its own
    if state.state == "requeued" and not requeue():
        state = write_state(folder, replace(state, state="failed", reason=f"{state.reason}; {_REFUSED}"))
    return state


def _wait_for_answer(ask: Callable[[], Answer | None]) -> Answer | None:
    """The first answer of the controller, within _PATIENCE seconds."""
    deadline = time.monotonic() + _PATIENCE
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(_RETRY)
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them while it ends or requeues the job
    parser = cli.parser("cluster.job_end", __doc__)
    parser.add_argument("--folder", type=cli.input_path, required=True, metavar="MODEL_FOLDER", help="model folder")
    parser.add_argument("--code", type=int, required=True, metavar="N", help="exit code of srun")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="N", help="restarts without a new checkpoint")
    arguments = parser.parse_args(argv)
    # not job.json: the submitter may not have written it yet, or may have been killed
    job = Job(os.environ["SLURM_JOB_ID"], "slurm", "")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return end_job(arguments.folder, job, arguments.code, restarts, arguments.max_restarts)


if __name__ == "__main__":
    sys.exit(cli.run(main, signals=False))
