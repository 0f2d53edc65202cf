"""Submit a training job with one process per GPU, to Slurm or on this machine.

    python -m cluster.submit --config config.yaml --model tiny --wait
    python -m cluster.submit --config configs/openwebtext.yaml --model gpt2_345m --dry-run

The section `cluster` decides where it runs (executor, partition, GPUs per node), the model's `parallel` decides the
number of processes. The job runs a copy of the code and the settings; editing them does not change it. A job that is
still alive is not submitted twice: the command finds it again, or names the settings that were changed since.
`--wait` follows the job to its end, over restarts; Ctrl-C then ends only the waiting for a Slurm job, and stops a job
on this machine.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster import slurm
from cluster.jobs import Job, State, look, read_job, write_job, write_state
from cluster.submission import job_name, make_snapshot, nodes_and_tasks, slurm_executor, start
from cluster.training_job import TrainingJob
from cluster.wait import wait
from common import cli
from common.config import load_settings
from common.errors import ConfigError
from common.files import lock, read_json
from common.settings import Settings, changes
from training.model_folder import newest_iteration, stop_file, stopped_mark
from training.planning.fit import prepare
from training.planning.machines import processes_of


def _training(name: str, snapshot: Path) -> TrainingJob:
    return TrainingJob(str(snapshot / "settings.yaml"), name, requeue=False)


def find_job(folder: Path, name: str, settings: Settings) -> Job | None:
    """The job of a model folder that is still alive: the recorded one, or one that Slurm has and nobody recorded."""
    job = read_job(folder)
    if job is not None:
        known = look([job])
        if known is None or (job.id in known and known[job.id].active):  # a silent controller: it may be alive
            return job
    if settings.cluster.executor != "slurm":
        return None
    unrecorded = [queued for queued in slurm.queue(name=name) or [] if queued.active]
    if not unrecorded:
        return None
    found = Job(unrecorded[-1].id, "slurm", str(folder / "logs"), name)
    if unrecorded[-1].state == "PENDING":
        _remove_marks(folder, time.time_ns())
    write_job(folder, found)
    return found


def submit(settings: Settings, name: str) -> Job:
    """Start the training job of a model, or return the one that is still alive.

    Raises ConfigError, before any file is written, for a model that is too large or too slow for its machine.
    """
    settings = _checked(settings, name)
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "submit.lock", "w") as guard:
        # Of two submissions, the second finds the first one's job. The lock outlives a killed submitter until sbatch
        # has ended.
        lock(guard, wait=True)
        full_name = job_name(settings, name)
        if job := find_job(folder, full_name, settings):
            _check_unchanged(settings, name, job)
            print(f"{name}: job {job.id} is still alive; not submitted again")
            return job
        snapshot = make_snapshot(settings, folder)
        print(full_name, file=guard, flush=True)  # gives the file the time of the submission
        minutes = settings.models[name].time_limit_minutes
        job_id = start(settings, _training(name, snapshot), minutes, keep_open=[guard.fileno()])
        _remove_marks(folder, os.fstat(guard.fileno()).st_mtime_ns)  # only now: a refusal changes nothing
        job = Job(job_id, settings.cluster.executor, str(folder / "logs"), full_name, str(snapshot))
        write_job(folder, job)
        write_state(folder, State(job.id, "queued", checkpoint=newest_iteration(folder)))
    processes = processes_of(settings.models[name], settings.cluster)
    print(f"{name}: submitted job {job.id} ({processes} processes), logs in {job.logs}")
    return job


def _remove_marks(folder: Path, submitted: int) -> None:
    """Remove the files that say how the last job ended, unless the new one has written its own already."""
    for path in (folder / "done.json", stop_file(folder), stopped_mark(folder)):
        if path.exists() and path.stat().st_mtime_ns < submitted:
            path.unlink(missing_ok=True)


def _check_unchanged(settings: Settings, name: str, job: Job) -> None:
    """Raise ConfigError if a job that is alive trains something else than these settings would."""
    if not job.snapshot:
        return  # nobody recorded the job
    submitted = load_settings(Path(job.snapshot) / "settings.yaml")
    then, now = (each.models[name].recipe for each in (submitted, settings))
    if keys := changes(then, now, f"models.{name}."):
        raise ConfigError(
            f"job {job.id} is alive with other settings: {', '.join(keys)}; restore them, or end the job first: "
            f"python -m cluster.cancel {settings.model_folder(name)}"
        )


def is_finished(settings: Settings, name: str) -> bool:
    """Whether a model has been trained to its last iteration, or until it improved no more."""
    done, train = settings.model_folder(name) / "done.json", settings.models[name].train
    end = read_json(done) if done.exists() else {}
    without = end.get("validations_without_improvement", 0)
    return int(end.get("iteration", 0)) >= train.iterations or 0 < train.stop_after_no_improvement <= without


def _checked(settings: Settings, name: str) -> Settings:
    """The settings that the job gets: their processes fill whole nodes, and the planner has checked the layout."""
    nodes_and_tasks(name, settings.models[name], settings.cluster)
    return prepare(settings, name)


def describe(settings: Settings, name: str) -> str:
    """What would be submitted: the batch script, or the processes that would be started here."""
    settings = _checked(settings, name)
    folder = settings.model_folder(name).resolve()
    training = _training(name, folder / "snapshots" / "DIGEST")
    if settings.cluster.executor == "slurm":
        return slurm_executor(settings, training, settings.models[name].time_limit_minutes).batch_script()
    _, tasks = nodes_and_tasks(name, settings.models[name], settings.cluster)
    return f"{tasks} processes of: {sys.executable} -m {training.module} --config {training.config} --model {name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.submit", __doc__)
    cli.add_model_settings(parser)
    parser.add_argument("--wait", action="store_true", help="wait for the job to end")
    parser.add_argument(
        "--terminal", type=int, metavar="N", help="descriptor that gets the progress of a local job, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script that would be submitted")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if arguments.dry_run:
        print(describe(settings, arguments.model))
        return 0
    if is_finished(settings, arguments.model):
        print(f"{arguments.model}: finished, nothing to do; {settings.model_folder(arguments.model) / 'done.json'}")
        return 0
    job = submit(settings, arguments.model)
    if arguments.wait:
        folder, restarts = settings.model_folder(arguments.model).resolve(), settings.cluster.max_restarts
        wait(arguments.model, folder, job, restarts, arguments.terminal if job.executor == "local" else None)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
