"""One training job: its record, its state, and whether it is alive.

MODEL_FOLDER/job.json records the last job that was submitted. It outlives the submitting process,
so that a second submission finds the first job. MODEL_FOLDER/state.json is the job's last recorded
state, written by its submission, each start, its end or a person. `current_state` alone determines
the state now, from that record, the other files and Slurm.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil

from cluster import slurm
from cluster.slurm import HIDDEN, UNKNOWN, QueuedJob
from common.config import read_yaml
from common.console import note
from common.errors import ConfigError, InputError
from common.files import read_json, write_json
from common.job_log import last_lines
from training.launch.rank import STARTING
from training.model_folder import stopped_mark
from training.monitoring.heartbeat import progress_of

StateName = Literal["queued", "running", "requeued", "finished", "failed", "cancelled", "out of restarts"]
FINAL = ("finished", "failed", "cancelled", "out of restarts")
ASKED = "a person asked it to stop"
POLL = {"local": 0.5, "slurm": 5.0}
"""Seconds between two queries of a job, by executor."""
_LAG = 20.0  # seconds for a Slurm job's last files to appear on a network file system


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    id: str
    """Slurm's job id, or the process id of submitit's local controller."""
    executor: str
    """slurm or local."""
    logs: str
    """Folder of the job's logs."""
    name: str = ""
    """Unique per model folder: identifies a job that Slurm accepted and nobody recorded."""
    snapshot: str = ""
    """Folder with the code and the settings that the job runs."""


@dataclass(frozen=True)
class State:
    """The state of a job."""

    job: str
    state: StateName
    reason: str = ""
    restarts: int = 0
    restarts_without_progress: int = 0
    """Consecutive restarts without a new checkpoint."""
    checkpoint: int = 0
    """Iteration of the newest checkpoint when this was written."""
    time: float = 0.0
    """When it was recorded, seconds since the epoch; 0: it is not recorded."""

    def __str__(self) -> str:
        """The state with its reason and the number of restarts."""
        reason = "" if self.reason in ("", "None") else f": {self.reason}"
        return f"{self.state}{reason}{f' (restarts: {self.restarts})' if self.restarts else ''}"


def require_folder(folder: Path) -> Path:
    """The absolute path of a model folder. Raises InputError if there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    return folder.resolve()


def read_job(folder: Path) -> Job | None:
    """The last job of a model folder, or None. Raises InputError for a damaged record."""
    path = folder / "job.json"
    if not path.exists():
        return None
    try:
        return Job(**read_json(path))
    except TypeError:
        raise InputError(f"{path}: not a job record; remove it if no job of this model is alive") from None


def write_job(folder: Path, job: Job) -> None:
    """Record the job of a model folder."""
    write_json(folder / "job.json", asdict(job))


def read_state(folder: Path, job: Job) -> State | None:
    """The recorded state of a job; None if there is none, or if it is another job's."""
    try:
        state = State(**read_json(folder / "state.json"))
    except (OSError, TypeError, InputError):
        return None
    return state if state.job == job.id else None


def write_state(folder: Path, state: State) -> State:
    """Record the state of a model folder's job; returns it with the time."""
    state = replace(state, time=round(time.time(), 1))
    write_json(folder / "state.json", asdict(state))  # the job's end, a waiter and cluster.cancel may do so at once
    return state


def write_running(folder: Path, key: str) -> None:
    """Record that a job has started or restarted. `key` is its `Launch.key`."""
    _, number, restarts = _split_key(key)
    before = read_state(folder, Job(number, "", "")) or State(number, "queued")
    if before.state != "cancelled":  # by a person, who waits until it ends
        write_state(folder, replace(before, state="running", reason="", restarts=restarts))


def query_jobs(jobs: Sequence[Job], arrays: Iterable[str] = ()) -> dict[str, QueuedJob]:
    """The jobs and arrays that Slurm or this machine still knows, by id, from one squeue call.

    If the controller is silent, all Slurm jobs have the state UNKNOWN; hidden jobs of other users,
    too. Raises InputError if there is no squeue here.
    """
    ids = [*(job.id for job in jobs if job.executor == "slurm"), *arrays]
    queued = slurm.queue(ids)
    known = slurm.unknown(ids) if queued is None else {job.id: job for job in queued}
    foreign = [job.id for job in jobs if job.executor == "slurm" and job.id not in known and _is_foreign(job)]
    if foreign and slurm.hides_jobs():
        known |= slurm.unknown(foreign, HIDDEN)
    for job in jobs:
        if job.executor == "local" and _is_local_alive(job):
            known[job.id] = QueuedJob(job.id, job.name, "RUNNING", "None", "localhost")
    return known


def states(folder: Path, job: Job, output: Path | None = None) -> Iterator[tuple[State, QueuedJob | None]]:
    """Yield the state of a job, and its entry in Slurm's queue, every POLL seconds.

    A job that Slurm has ended without a recorded state fails only after _LAG seconds, or as soon as
    `output` exists, which it writes at its end. Prints once that the controller is silent.
    """
    silent, ended = False, 0.0
    while True:
        queued = query_jobs([job]).get(job.id)
        unknown = queued is not None and queued.state == UNKNOWN
        if queued is not None and unknown and not silent:
            note(f"{folder.name}: {queued.reason}; still waiting")
        silent = unknown
        state = current_state(folder, job, queued)
        lost = state.state == "failed" and not state.time and job.executor == "slurm"
        ended = (ended or time.monotonic()) if lost else 0.0
        if not lost or time.monotonic() >= ended + _LAG or (output is not None and output.exists()):
            yield state, queued
        time.sleep(POLL[job.executor])


def _is_foreign(job: Job) -> bool:
    """Whether another user has submitted and recorded it."""
    record = Path(job.logs).parent / "job.json"
    return record.exists() and record.stat().st_uid != os.getuid()


def _is_local_alive(job: Job) -> bool:
    try:
        process = psutil.Process(int(job.id))
        # The command line distinguishes our controller from a later process with the same id.
        ours = "submitit.local._local" in process.cmdline() and job.logs in process.cmdline()
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def current_state(folder: Path, job: Job, queued: QueuedJob | None) -> State:
    """The state of a job, from the files of its model folder and what `query_jobs` returned for it.

    Its `time` is 0 if it is not recorded.
    """
    recorded = read_state(folder, job) or State(job.id, "queued")
    claimed = claimed_restarts(folder, job)
    now = replace(recorded, reason="", time=0.0)
    unknown = queued is not None and queued.state == UNKNOWN
    if queued is not None and queued.active and not unknown:
        if queued.state == "PENDING":
            # a job that Slurm itself requeues, after the loss of a node, does not record it
            started = recorded.restarts > 0 or claimed is not None or log_path(job).exists()
            return replace(now, state="requeued" if started else "queued", reason=queued.reason)
        return replace(now, state="running", restarts=max(recorded.restarts, claimed or 0))
    if recorded.state in FINAL:
        return recorded
    if (folder / "done.json").exists():
        return replace(now, state="finished")
    if stopped_mark(folder).exists():
        return replace(now, state="cancelled", reason=ASKED)
    if queued is not None and unknown:
        running = claimed is not None and claimed >= recorded.restarts
        return replace(now, state="running" if running else recorded.state, reason=queued.reason)
    if queued is not None and queued.state == "CANCELLED":
        return replace(now, state="cancelled", reason="scancel")
    last = [line.removeprefix("error: ") for line in log_tail(job, 1)[1] if line.startswith("error: ")]
    reason = last[0] if last else "it exited without an error message; its log may say why"
    return replace(now, state="failed", reason=f"Slurm's state: {queued.state}" if queued else reason)


def progress(folder: Path, job: Job, state: State) -> str:
    """One line: how far the job's training is, or what its start does, and the job's state."""
    line = f"job {job.id} {state}"
    if state.state == "running":
        last = progress_of(folder)
        what = f"iteration {last['done']}/{total_iterations(folder, job) or '?'}" if last else beginning(folder, job)
        loss = f", loss {last['loss']:.4f}" if "loss" in last else ""  # first: a terminal cuts off the end
        left = f", {timedelta(seconds=last['seconds_left'])} left" if "seconds_left" in last else ""
        line = f"{what}{loss}{left}; {line}" if what else line
    return f"{folder.name}: {line}"


def beginning(folder: Path, job: Job) -> str:
    """What a job that runs does before its first iteration, by rank 0's log; empty if unknown."""
    with suppress(OSError):
        if progress_of(folder):
            return ""
        lines = [line for line in last_lines(log_path(job))[0] if line.startswith((STARTING, "iteration "))]
        return lines[-1].removeprefix(STARTING) if lines and lines[-1].startswith(STARTING) else ""
    return ""


def total_iterations(folder: Path, job: Job | None) -> int | None:
    """train.iterations of the job's snapshot, or of the folder's last training, if known."""
    snapshots = [Path(job.snapshot)] if job is not None and job.snapshot else []
    for path in (parent / "settings.yaml" for parent in (*snapshots, folder)):
        with suppress(ConfigError, KeyError, TypeError, ValueError):
            return int(read_yaml(path)["models"][folder.name]["train"]["iterations"])
    return None


def claimed_restarts(folder: Path, job: Job) -> int | None:
    """The requeues of a job before it locked its model folder; None if another job has it."""
    with suppress(OSError, InputError, KeyError, TypeError, ValueError):
        executor, number, restarts = _split_key(str(read_json(folder / "owner.json")["job"]))
        if (executor, number) == (job.executor, job.id):
            return restarts
    return None


def _split_key(key: str) -> tuple[str, str, int]:
    """Executor, job id and requeues of a `Launch.key` such as slurm-4711.0-2 or local-4711."""
    executor, _, rest = key.partition("-")
    job, _, step = rest.partition(".")
    return executor, job, int(step.partition("-")[2] or 0)


def log_path(job: Job, rank: int = 0) -> Path:
    """The log of one rank, over all restarts of the job."""
    return Path(job.logs) / f"{job.id}_{rank}_log.out"


def log_tail(job: Job, lines: int = 15) -> tuple[Path, list[str]]:
    """The log of rank 0, and its last lines without those of submitit and srun."""
    path = log_path(job)
    text = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return path, [line for line in text if not line.startswith(("submitit ", "srun: ", "slurmstepd"))][-lines:]
