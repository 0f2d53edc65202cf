"""Submit a training job with one process per GPU, to Slurm or on this machine.

    python -m cluster.submit --config config.yaml --model tiny --wait
    python -m cluster.submit --config configs/openwebtext.yaml --model gpt2_345m --dry-run

The section `cluster` decides where it runs (executor, partition, GPUs per node), the model's
`parallel` decides the number of processes. The job runs a copy of the code and the settings;
editing them does not change it. A job that is still alive is not submitted twice: the command finds
it again, or names the settings that were changed since. `--wait` follows the job to its end, over
restarts. Ctrl-C then ends the waiting, not the Slurm job. With the local executor it stops the job
with a checkpoint, as for any foreground process.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster import jobs, slurm
from cluster.cancel import cancel
from cluster.elastic import Patience, grow
from cluster.executors import job_name, node_counts, nodes_and_tasks, slurm_executor
from cluster.job_end import requeue_dead
from cluster.jobs import FINAL, Job, State
from cluster.submission import make_snapshot, remove_marks, start
from cluster.training_job import TrainingJob
from common import cli
from common.config import load_settings
from common.console import note
from common.errors import ConfigError, JobError
from common.files import lock
from common.progress import Ticker
from common.settings import Settings, changes
from training.model_folder import is_finished
from training.planning.elastic import describe_counts, process_counts
from training.planning.fit import prepare


def _training(name: str, snapshot: Path) -> TrainingJob:
    return TrainingJob(str(snapshot / "settings.yaml"), name, requeue=False)


def find_job(folder: Path, name: str, settings: Settings) -> Job | None:
    """The live job of a model folder: the recorded one, or an unrecorded one in Slurm's queue.

    Raises JobError if there is no record and the controller is silent.
    """
    job = jobs.read_job(folder)
    if job is not None:
        state = jobs.current_state(folder, job, jobs.query_jobs([job]).get(job.id))
        if state.state not in FINAL:  # also if its state is unknown: it may be alive
            return job
    if settings.cluster.executor != "slurm":
        return None
    queue = slurm.queue(name=name)
    if queue is None:
        raise JobError(f"{folder.name}: {slurm.SILENT}; run the same command again later")
    unrecorded = [queued for queued in queue if queued.active]
    if not unrecorded:
        return None
    job = Job(unrecorded[-1].id, "slurm", str(folder / "logs"), name)
    if unrecorded[-1].state == "PENDING":
        remove_marks(folder, time.time_ns())
    jobs.write_job(folder, job)
    return job


def submit(settings: Settings, name: str, waits: bool = True) -> Job:
    """Start the training job of a model, or return the one that is still alive.

    `waits`: the caller waits for the job, see `Patience`; else it starts on fewer nodes at once.
    Raises ConfigError, before any file is written, for a model that is too large or too slow for
    its machine.
    """
    settings = _checked(settings, name)
    if not waits:
        cluster = settings.cluster.model_copy(update={"shrink_after_minutes": 0})
        settings = settings.model_copy(update={"cluster": cluster})
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "submit.lock", "w") as guard:
        # Of two submissions, the second finds the first one's job. The lock outlives a killed
        # submitter until sbatch has ended.
        lock(guard, wait=True)
        if job := find_job(folder, job_name(settings, name), settings):
            _check_unchanged(settings, name, job)
            print(f"{name}: job {job.id} is still alive; not submitted again")
            return job
        snapshot = make_snapshot(settings, folder)
        minutes = settings.models[name].time_limit_minutes
        job = start(settings, _training(name, snapshot), minutes, keep_open=[guard.fileno()])
    counts, tasks = node_counts(name, settings.models[name], settings.cluster)
    size = describe_counts([count * tasks for count in counts])
    print(f"{name}: submitted job {job.id} ({size}), logs in {job.logs}")
    return job


def _check_unchanged(settings: Settings, name: str, job: Job) -> None:
    """Raise ConfigError if a job that is alive trains something else than these settings would."""
    if not job.snapshot:
        return  # nobody recorded the job
    submitted = load_settings(Path(job.snapshot) / "settings.yaml")
    then, now = (each.models[name].recipe for each in (submitted, settings))
    if keys := changes(then, now, name=f"models.{name}."):
        raise ConfigError(
            f"job {job.id} is alive with other settings: {', '.join(keys)}; restore them, or end the job first: "
            f"python -m cluster.cancel {settings.model_folder(name)}"
        )


def _checked(settings: Settings, name: str) -> Settings:
    """The job's settings. Raises ConfigError if nodes are not full or the planner rejects them."""
    nodes_and_tasks(name, settings.models[name], settings.cluster)
    return prepare(settings, name)


def describe(settings: Settings, name: str) -> str:
    """Describe the job: the batch script, or the processes that would be started here."""
    settings = _checked(settings, name)
    folder = settings.model_folder(name).resolve()
    training = _training(name, folder / "snapshots" / "DIGEST")
    if settings.cluster.executor == "slurm":
        return slurm_executor(settings, training, settings.models[name].time_limit_minutes).batch_script()
    _, tasks = nodes_and_tasks(name, settings.models[name], settings.cluster)
    return f"{tasks} processes of: {sys.executable} -m training.train --config {training.config} --model {name}"


def wait(name: str, folder: Path, job: Job, max_restarts: int) -> None:
    """Wait for the job of a model folder; print every 10 s how far it is.

    Raises JobError if the job did not finish, and if it waits for something that will not come (it
    is cancelled then).
    """
    try:
        state = _final_state(folder, job, max_restarts)
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
    path, lines = jobs.log_tail(job)
    quoted = "".join(f"\n    {line}" for line in lines if line.removeprefix("error: ") != state.reason)
    raise JobError(f"{name}: job {job.id} {state}; log: {path if path.exists() else job.logs}{quoted}")


def _final_state(folder: Path, job: Job, max_restarts: int) -> State:
    """The state in which a job ends; recorded."""
    ticker, patience = Ticker(), Patience(job, folder.name)
    for state, queued in jobs.states(folder, job):
        patience.look(queued)
        if queued is not None and queued.unschedulable:
            slurm.cancel([job.id])
            state = replace(state, state="failed", reason=slurm.never_starts(queued))
        elif state.state == "failed" and not state.time and job.executor == "slurm":
            state = requeue_dead(folder, job, state, max_restarts)  # its batch script was killed
        if state.state in FINAL:
            return state if state.time else jobs.write_state(folder, state)
        begins = jobs.beginning(folder, job) if state.state == "running" else ""
        ticker.show(partial(jobs.progress, folder, job, state), begins)
    raise AssertionError


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.submit", __doc__)
    cli.add_model_settings(parser)
    parser.add_argument("--wait", action="store_true", help="wait for the job to end")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script that would be submitted")
    parser.add_argument("--grow", action="store_true", help="restart the running job on more nodes, if some are idle")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if arguments.dry_run:
        print(describe(settings, arguments.model))
        counts = process_counts(arguments.model, settings.models[arguments.model], settings.cluster)
        note(f"{arguments.model}: {describe_counts(counts)}")
        return 0
    if is_finished(settings, arguments.model):
        print(f"{arguments.model}: finished, nothing to do; {settings.model_folder(arguments.model) / 'done.json'}")
        return 0
    if arguments.grow:
        print(grow(settings.model_folder(arguments.model).resolve(), arguments.model))
        return 0
    job = submit(settings, arguments.model, arguments.wait)
    if arguments.wait:
        folder, restarts = settings.model_folder(arguments.model).resolve(), settings.cluster.max_restarts
        wait(arguments.model, folder, job, restarts)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
