"""Measures layouts: each is a job of its own that runs `training.probe`, on Slurm or on this machine.

    for trial, result in run_trials(trials, launch, minutes=10, at_once=1):
        ...

A trial is a model of a run of its own, RUN/autotune/NAME:

    layout_0123abcd.json             the result: what training.probe wrote, or {"failed": reason}
    models/layout_0123abcd/          job.json and logs/
    snapshots/                       code and settings of the jobs

The name is a hash of everything that the result depends on. A trial with a result is not run again; a job that is still
alive is found again by its record, or by its name.
"""

import fcntl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import slurm, submission
from cluster.jobs import Job, log_path, log_tail, look, write_job
from cluster.slurm import QueuedJob
from cluster.submit import Launch, find_job
from common.console import note
from common.errors import InputError, JobError, ToolkitError
from common.files import read_json, write_json
from common.settings import Experiment
from training.planning.search import Prediction

POLL = {"local": 0.5, "slurm": 5.0}
"""Seconds between two looks at the jobs, by executor."""
_MINUTE = 60.0  # seconds
_LAG = 20.0  # seconds for a job's last file to appear on a network file system
_GRACE = {"local": 0.0, "slurm": 120.0}  # seconds after the time limit: Slurm ends its jobs itself, as a rule


@dataclass(frozen=True)
class Trial:
    """A layout to measure."""

    name: str
    """layout_0123abcd."""
    prediction: Prediction
    experiment: Experiment
    """In the layout."""
    folder: Path
    """RUN/autotune/NAME."""

    @property
    def output(self) -> Path:
        """The file of the result."""
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Result:
    """How a trial ended."""

    measured: dict[str, float] | None
    """`training.planning.comparison.Figures.plain`."""
    failed: str = ""
    """Why nothing was measured."""
    log: Path | None = None
    """The log of the job's first process."""
    tail: Sequence[str] = ()
    """Its last lines, if the trial failed."""


@dataclass
class _Running:
    """A trial whose job has been started."""

    trial: Trial
    job: Job
    since: float | None = None
    """When it was first seen running."""
    ended: float | None = None
    """When it was first seen to have ended."""


def read_result(trial: Trial) -> Result | None:
    """The result of a trial; None if there is none, or a damaged one."""
    try:
        found: dict[str, Any] = read_json(trial.output)
        if "failed" in found:
            log = Path(found["log"]) if "log" in found else None
            return Result(None, str(found["failed"]), log, tuple(found.get("tail", ())))
        return Result(dict(found["measured"]))
    except (OSError, InputError, KeyError, TypeError, ValueError):
        return None


def run_trials(
    trials: Sequence[Trial], launch: Callable[[Trial], Launch], minutes: int, at_once: int
) -> Generator[tuple[Trial, Result], None, None]:
    """Run each trial, at most `at_once` together; yields their results as they come.

    If it is closed early, jobs on this machine are ended; those of Slurm go on, to be found again.
    """
    waiting, running, silent = list(trials), list[_Running](), False
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                trial = waiting.pop(0)
                try:
                    running.append(_Running(trial, _start(launch(trial))))
                except ToolkitError as error:  # Slurm refuses it
                    yield trial, Result(None, str(error))
            known = look([each.job for each in running])
            if known is None and not silent:
                note("the Slurm controller does not answer; still waiting")
            silent = known is None
            for each in list(running):
                if known is not None and (result := _result(each, known, minutes)):
                    running.remove(each)
                    yield each.trial, result
            if running:
                time.sleep(POLL[running[0].job.executor])
    except BaseException:
        for each in running:
            if each.job.executor == "local":
                submission.kill_here(each.job.id)
        raise


def _start(launch: Launch) -> Job:
    """Start the job of a trial, or find the one that is still alive."""
    folder = launch.folder
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "submit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it outlives a killed submitter until its sbatch has ended
        if job := find_job(folder, launch.name, launch.settings):
            print(f"{launch.model}: job {job.id} is still alive; not started again", flush=True)
            return job
        number = launch.start(keep_open=[lock.fileno()])
        executor = launch.settings.cluster.executor
        job = Job(number, executor, str(folder / "logs"), launch.name, str(launch.snapshot))
        write_job(folder, job)
    return job


def _result(each: _Running, known: Mapping[str, QueuedJob], minutes: int) -> Result | None:
    """The result of a trial whose job has ended, or is ended here because it takes too long; None while it runs."""
    seen: QueuedJob | None = known.get(each.job.id)
    now = time.monotonic()
    if seen is not None and seen.active:
        if seen.hopeless:
            _end(each.job)
            return Result(None, slurm.never_starts(seen))
        if seen.state == "PENDING":
            each.since = None
            return None
        each.since = each.since or now
        if now - each.since < minutes * _MINUTE + _GRACE[each.job.executor]:
            return None
        _end(each.job)
        return read_result(each.trial) or _fail(each, _too_long(minutes))
    each.ended = each.ended or now
    if result := read_result(each.trial):
        return result if result.measured else _with_log(result, each.job)
    if each.job.executor == "slurm" and now - each.ended < _LAG:
        return None
    if seen is not None and seen.state in ("TIMEOUT", "CANCELLED"):
        return _fail(each, _too_long(minutes) if seen.state == "TIMEOUT" else "its job was cancelled")
    _, last = log_tail(each.job, 1)
    state = f"Slurm's state: {seen.state}; " if seen is not None else ""
    return _fail(each, f"{state}it ended without a result{f': {last[0]}' if last else ''}")


def _too_long(minutes: int) -> str:
    return f"it did not end within {minutes} minutes"


def _end(job: Job) -> None:
    """End a job."""
    if job.executor == "local":
        submission.kill_here(job.id)
        return
    with suppress(JobError):
        slurm.cancel([job.id])


def _fail(each: _Running, reason: str) -> Result:
    """Record the failure of a trial whose job could not do it."""
    result = _with_log(Result(None, reason), each.job)
    found = {"failed": reason, "log": str(result.log), "tail": list(result.tail)}
    write_json(each.trial.output, found)
    return result


def _with_log(result: Result, job: Job) -> Result:
    _, lines = log_tail(job)
    return Result(None, result.failed, log_path(job), tuple(lines))
