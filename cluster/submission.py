"""Starts the processes of a training job through submitit, on Slurm or on this machine.

    start(settings, TrainingJob(f"{snapshot}/settings.yaml", "tiny", requeue=False), 60)

Every rank runs a `TrainingJob` from a snapshot of the code. The executors are those of
cluster/executors.py.

submitit runs from the snapshot in a process with its own session. Ctrl-C, a closed terminal or a
killed `cluster.submit` therefore cannot interrupt it between sbatch and the job's record, nor end a
job on this machine.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import submitit
from submitit.helpers import DelayedSubmission

from cluster import slurm
from cluster.executors import job_name, local_executor, logs_folder, pickle_of, slurm_executor, snapshot_environment
from cluster.jobs import Job, State, read_job, read_state, write_job, write_state
from cluster.training_job import TrainingJob
from common import cli, run_card
from common.config import load_settings, settings_text
from common.errors import InputError
from common.files import write_text
from common.files.writing import replace_folder
from common.settings import Settings
from training.model_folder import newest_iteration, stop_file, stopped_mark

PACKAGES = ("common", "corpus", "training", "cluster", "workflow")
"""Packages that a training job imports."""
_ROOT = Path(__file__).resolve().parents[1]


def start(settings: Settings, job: TrainingJob, minutes: int, keep_open: Sequence[int] = ()) -> Job:
    """Submit the job to Slurm or start it here, and record it. Raises InputError if it is refused.

    `minutes`: the time limit; `keep_open`: file descriptors that the submitting process inherits,
    such as a lock that must outlive this process.
    """
    logs = logs_folder(settings, job.model)
    logs.mkdir(parents=True, exist_ok=True)
    DelayedSubmission(job).dump(pickle_of(job))
    command = [sys.executable, "-m", "cluster.submission", str(pickle_of(job)), str(minutes)]
    environment = {**slurm.environment(settings.cluster), **snapshot_environment(Path(job.config).parent)}
    with (logs / "submission.out").open("w+") as output:  # no pipe of ours, which a controller on this machine keeps
        submitting = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=keep_open,
        )  # fmt: skip
        if submitting.wait():
            output.seek(0)
            raise InputError((output.read().splitlines() or ["no message"])[-1].removeprefix("error: "))
    submitted = read_job(logs.parent)
    assert submitted is not None
    return submitted


def submit_here(job: TrainingJob, minutes: int) -> Job:
    """Submit a job from this process and record it. Raises RefusedError with Slurm's reason."""
    settings = load_settings(Path(job.config))
    make = local_executor if settings.cluster.executor == "local" else slurm_executor
    executor = make(settings, job, minutes)
    try:
        number = str(executor.submit(job).job_id)
    except submitit.core.utils.FailedJobError as error:
        raise slurm.RefusedError(str(error)) from None
    finally:  # what submitit leaves if Slurm refuses the job, and a link to the script if it does not
        for path in [*executor.folder.glob(".submission_file_*.sh"), *executor.folder.glob("?" * 32 + ".pkl")]:
            path.unlink()
    folder = executor.folder.parent
    remove_marks(folder, pickle_of(job).stat().st_mtime_ns)  # only now: a refusal changes nothing
    name, logs = job_name(settings, job.model), str(executor.folder)
    submitted = Job(number, settings.cluster.executor, logs, name, str(Path(job.config).parent))
    write_job(folder, submitted)
    if read_state(folder, submitted) is None:  # it has not started yet
        write_state(folder, State(number, "queued", checkpoint=newest_iteration(folder)))
    return submitted


def remove_marks(folder: Path, submitted: int) -> None:
    """Remove the files that say how the last job ended, but not those of the new job.

    `submitted`: when the new job was submitted, in nanoseconds since the epoch.
    """
    for path in (folder / "done.json", stop_file(folder), stopped_mark(folder)):
        if path.exists() and path.stat().st_mtime_ns < submitted:
            path.unlink(missing_ok=True)


def make_snapshot(settings: Settings, folder: Path) -> Path:
    """Copy the code and the settings to FOLDER/snapshots/DIGEST, of their content; returns it.

    A job and its restarts run the copy: editing sources or configuration does not change a job in
    the queue.
    """
    text = settings_text(settings)
    files = [
        path
        for package in PACKAGES
        for path in sorted((_ROOT / package).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    digest = hashlib.sha256(text.encode())
    for path in files:
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    snapshot = folder / "snapshots" / digest.hexdigest()[:12]
    if not snapshot.is_dir():
        with replace_folder(snapshot) as new:
            for package in PACKAGES:
                shutil.copytree(_ROOT / package, new / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
            write_text(new / "code" / run_card.COMMIT, run_card.commit(_ROOT) or "")
            write_text(new / "settings.yaml", text)
    return snapshot


def main(argv: Sequence[str] | None = None) -> int:
    """Run submitit in this process, which `start` starts."""
    pickle, minutes = argv or sys.argv[1:]
    submit_here(DelayedSubmission.load(pickle).function, int(minutes))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
