"""Submit a training job with one process per GPU, to Slurm through submitit or on this machine.

    python -m cluster.submit --config config.yaml --model tiny --wait
    python -m cluster.submit --config configs/openwebtext.yaml --model gpt2_345m --dry-run

The section `cluster` decides where it runs (executor, partition, GPUs per node), the model's `parallel` decides the
number of processes. The job runs a copy of the code and the settings; editing them does not change it. A job that is
still alive is not submitted twice: the command finds it again, or names the settings that were changed since.
`--wait` follows the job to its end, over restarts; Ctrl-C then ends only the waiting for a Slurm job, and stops a job
on this machine.
"""

import fcntl
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from submitit.slurm.slurm import SlurmExecutor

from cluster import slurm, submission
from cluster.jobs import Job, State, look, read_job, write_job, write_state
from cluster.snapshot import make_snapshot, remove_snapshots
from cluster.wait import wait
from common import cli, rule_keys
from common.config import load_settings
from common.errors import ConfigError
from common.files import read_json
from common.settings import ClusterSettings, Experiment, Settings
from common.tables import text_table
from training.model_folder import newest_iteration, stop_file, stopped_mark
from training.planning.auto import prepare
from training.planning.this_machine import processes_of


def nodes_and_tasks(name: str, experiment: Experiment, cluster: ClusterSettings) -> tuple[int, int]:
    """(nodes, processes per node) of model `name`: on as few nodes as possible, all of them full.

    Raises ConfigError if the processes do not fill whole nodes, or if the local executor needs more than one node.
    """
    per_node = cluster.gpus_per_node or cluster.tasks_per_node
    processes = processes_of(experiment, cluster)
    tasks = min(processes, per_node)
    nodes, rest = divmod(processes, tasks)
    asks = f"models.{name}.parallel asks for {processes} processes"
    if rest:
        raise ConfigError(
            f"{asks}, which do not fill whole nodes of {per_node}; choose a multiple, or change cluster.gpus_per_node"
        )
    if cluster.executor == "local" and nodes > 1:
        raise ConfigError(
            f"{asks} and cluster.executor is local with {per_node} per node; use executor: slurm, or raise "
            "cluster.gpus_per_node or tasks_per_node"
        )
    return nodes, tasks


def job_name(settings: Settings, name: str) -> str:
    """RUN-MODEL-HASH: readable in squeue, and unique for the model folder."""
    folder = settings.model_folder(name).resolve()
    readable = re.sub(r"[^\w.-]+", "_", f"{folder.parents[1].name}-{name}")
    return f"{readable}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Launch:
    """Processes to start, in the shape of a model's training."""

    settings: Settings
    model: str
    snapshot: Path
    name: str
    """The job's name in Slurm."""
    module: str
    """What each process runs, with --config and --model."""
    minutes: int
    at_end: Sequence[str] = ()
    """Shell commands that prepare the end of a Slurm job's batch script."""
    options: Sequence[str] = ()
    """Further options of the module."""

    @property
    def folder(self) -> Path:
        """The model folder."""
        return self.settings.model_folder(self.model).resolve()

    @property
    def shape(self) -> tuple[int, int]:
        """See `nodes_and_tasks`."""
        return nodes_and_tasks(self.model, self.settings.models[self.model], self.settings.cluster)

    @property
    def command(self) -> str:
        """The command line of one process."""
        container = self.settings.cluster.container
        return submission.rank_command(self.snapshot, self.model, container, self.module, self.options)

    def slurm_executor(self) -> SlurmExecutor:
        """submitit's executor for the Slurm job."""
        cluster = self.settings.cluster
        nodes, tasks = self.shape
        exports = (f"export {key}={shlex.quote(value)}" for key, value in submission.python_path(self.snapshot).items())
        setup = [*exports, *cluster.setup, *self.at_end]
        return submission.slurm_executor(self.folder / "logs", self.name, nodes, tasks, self.minutes, cluster, setup)

    def start(self, keep_open: Sequence[int] = ()) -> str:
        """Start the processes, on Slurm or here; returns the id of the job. `keep_open`: see `slurm.submit`."""
        cluster = self.settings.cluster
        if cluster.executor == "slurm":
            return submission.submit_to_slurm(self.slurm_executor(), self.command, keep_open)
        _, tasks = self.shape
        environment, gpus = submission.python_path(self.snapshot), tasks if cluster.gpus_per_node else 0
        return submission.start_here(self.folder / "logs", tasks, self.minutes, gpus, self.command, environment)


def _training(settings: Settings, name: str, snapshot: Path) -> Launch:
    """The training of a model. On Slurm, the end of its batch script decides whether it is requeued."""
    folder = settings.model_folder(name).resolve()
    options = ["--folder", str(folder), "--max-restarts", str(settings.cluster.max_restarts)]
    job_end = shlex.join([sys.executable, "-m", "cluster.job_end", *options])
    at_end = [
        "# The shell outlives the signals that Slurm sends to the whole job: it waits for the ranks, then job_end",
        "# records how they ended and requeues the job if it should go on.",
        "trap : TERM USR2 HUP",
        f'job_end() {{ code=$?; trap "" TERM USR2 HUP; {job_end} --code $code; exit $?; }}',
        "trap job_end EXIT",
    ]
    minutes = settings.models[name].time_limit_minutes
    return Launch(settings, name, snapshot, job_name(settings, name), "training.train", minutes, at_end)


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
        _remove(_left_behind(folder))
    write_job(folder, found)
    return found


def _left_behind(folder: Path) -> dict[Path, tuple[int, int]]:
    """The files of a model folder that say how its last job ended, each with what identifies it."""
    paths = (folder / "done.json", stop_file(folder), stopped_mark(folder))
    return {path: _identity(path) for path in paths if path.exists()}


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _remove(files: Mapping[Path, tuple[int, int]]) -> None:
    """Remove files, unless the new job has written its own already."""
    for path, identity in files.items():
        if path.exists() and _identity(path) == identity:
            path.unlink(missing_ok=True)


def submit(settings: Settings, name: str) -> Job:
    """Start the training job of a model, or return the one that is still alive.

    Raises ConfigError, before any file is written, for a model that is too large or too slow for its machine.
    """
    settings = _checked(settings, name)
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "submit.lock", "w") as lock:
        # Of two submissions, the second finds the first one's job. The lock outlives a killed submitter until its
        # sbatch has ended.
        fcntl.flock(lock, fcntl.LOCK_EX)
        full_name = job_name(settings, name)
        if job := find_job(folder, full_name, settings):
            _check_unchanged(settings, name, job)
            print(f"{name}: job {job.id} is still alive; not submitted again")
            return job
        earlier, left_behind = read_job(folder), _left_behind(folder)
        snapshot = make_snapshot(settings, folder)
        job_id = _training(settings, name, snapshot).start(keep_open=[lock.fileno()])
        _remove(left_behind)  # only now: a job that Slurm refuses changes nothing
        job = Job(job_id, settings.cluster.executor, str(folder / "logs"), full_name, str(snapshot))
        write_job(folder, job)
        write_state(folder, State(job.id, "queued", checkpoint=newest_iteration(folder)))
        if earlier is None or earlier.snapshot:  # otherwise nobody knows which one it uses
            # the earlier job's stays: an administrator may requeue it
            remove_snapshots(folder, keep={snapshot, *([Path(earlier.snapshot)] if earlier else [])})
    processes = processes_of(settings.models[name], settings.cluster)
    print(f"{name}: submitted job {job.id} ({processes} processes), logs in {job.logs}")
    return job


def _check_unchanged(settings: Settings, name: str, job: Job) -> None:
    """Raise ConfigError if a job that is alive trains something else than these settings would."""
    if not job.snapshot:
        return  # nobody recorded the job
    try:
        submitted = load_settings(Path(job.snapshot) / "settings.yaml")
    except ConfigError:
        return  # another version of the toolkit submitted it
    then, now = (rule_keys.train(each, name) for each in (submitted, settings))
    if keys := rule_keys.changed(then, now, f"models.{name}"):
        folder = settings.model_folder(name)
        raise ConfigError(
            f"job {job.id} is alive with other settings: {', '.join(keys)}; restore them, or end the job first: "
            f"python -m cluster.cancel {folder}"
        )


def is_finished(settings: Settings, name: str) -> bool:
    """Whether a model has been trained to its last iteration."""
    done = settings.model_folder(name) / "done.json"
    return done.exists() and int(read_json(done).get("iteration", 0)) >= settings.models[name].train.iterations


def _checked(settings: Settings, name: str) -> Settings:
    """The settings that the job gets: their processes fill whole nodes, and the planner has checked the layout."""
    nodes_and_tasks(name, settings.models[name], settings.cluster)
    return prepare(settings, name)


def describe(settings: Settings, name: str) -> str:
    """What would be submitted: the batch script, or the processes that would be started here."""
    settings = _checked(settings, name)
    folder = settings.model_folder(name).resolve()
    launch = _training(settings, name, folder / "snapshots" / "DIGEST")
    if settings.cluster.executor == "slurm":
        return submission.batch_script(launch.slurm_executor(), launch.command)
    rows = {
        "model folder": folder,
        "executor": "local",
        "processes": launch.shape[1],
        "minutes": launch.minutes,
        "command": launch.command,
    }
    return text_table(rows.items())


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
