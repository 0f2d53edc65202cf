"""One training job: its record on disk, whether it is alive, and what its ranks run.

The record is job.json in the model folder. It outlives the submitting process, so that a second submission finds the
first job.
"""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from common import cli
from common.config import validate
from common.errors import InputError
from common.files import read_json, write_json

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    id: str
    """Slurm's job id, or the process id of submitit's local controller."""
    executor: str
    """slurm or local."""
    logs: str
    """Folder of the job's logs."""


def record_path(folder: Path) -> Path:
    """The file that records the job of a model folder."""
    return folder / "job.json"


def read_job(folder: Path) -> Job | None:
    """The last job submitted for a model folder; None if there is none. Raises InputError for a damaged record."""
    path = record_path(folder)
    if not path.exists():
        return None
    try:
        return Job(**read_json(path))
    except TypeError:
        raise InputError(f"{path}: not a job record; remove it if no job of this model is alive") from None


def write_job(folder: Path, job: Job) -> None:
    """Record the job of a model folder."""
    write_json(record_path(folder), asdict(job))


def _local_is_alive(job: Job) -> bool:
    try:
        process = psutil.Process(int(job.id))
        # The command line distinguishes our controller from a later process with the same id.
        ours = "submitit.local._local" in process.cmdline() and job.logs in process.cmdline()
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _slurm_is_alive(job: Job) -> bool:
    # squeue needs no accounting database; it forgets a job a few minutes after its end.
    answer = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job.id}", "--format=%T"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        return "invalid job id" not in answer.stderr.lower()  # an unreachable controller says nothing about the job
    return any(not state.startswith(ENDED) for state in answer.stdout.split())


def is_alive(job: Job) -> bool:
    """Whether a job is still queued or running."""
    return _slurm_is_alive(job) if job.executor == "slurm" else _local_is_alive(job)


def log_tail(job: Job, lines: int = 15) -> tuple[Path | None, list[str]]:
    """The log of a job's first rank, and its last lines without submitit's own messages."""
    path = Path(job.logs) / f"{job.id}_0_log.out"
    if not path.exists():
        return None, []
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return path, [line for line in text if not line.startswith("submitit ")][-lines:]


def run_training(settings: dict[str, Any], name: str, folder: str) -> None:
    """Train a model, in working folder `folder`; every rank of a job runs this. Exits with a code if training fails.

    The settings travel with the job as plain data, so editing config.yaml later does not change a queued job.
    """
    from training.train import train

    os.chdir(folder)

    def main() -> int:
        return train(validate(settings, "submitted configuration"), name)

    if code := cli.run(main):
        sys.exit(code)  # so that Slurm marks the job FAILED
