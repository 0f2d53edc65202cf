"""Submit a training job with one process per GPU, to Slurm through submitit or on this machine.

    python -m cluster.submit --config config.yaml --model tiny --wait
    python -m cluster.submit --config configs/openwebtext.yaml --model gpt2_345m --dry-run

The section `cluster` decides where it runs (executor, partition, GPUs per node), the model's `parallel` decides the
number of processes. A job that is still alive is not submitted twice: the command finds it again. `--wait` follows the
job to its end.
"""

import fcntl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.jobs import Job, is_alive, log_tail, read_job, run_training, write_job
from common import cli
from common.errors import ConfigError, InputError, JobError
from common.progress import LOG_INTERVAL
from common.settings import ClusterSettings, Experiment, Settings
from common.tables import text_table

_POLL = {"local": 0.5, "slurm": 10.0}  # seconds between two checks of a job


def job_parameters(name: str, experiment: Experiment, cluster: ClusterSettings) -> dict[str, Any]:
    """submitit's parameters for model `name`: one task per rank, on as few nodes as possible.

    Raises ConfigError if the ranks do not fill whole nodes, or if the local executor needs more than one node.
    """
    per_node = cluster.gpus_per_node or cluster.tasks_per_node
    tasks = min(experiment.world_size, per_node)
    nodes, rest = divmod(experiment.world_size, tasks)
    if rest:
        raise ConfigError(
            f"models.{name}.parallel asks for {experiment.world_size} processes, which do not fill whole nodes of "
            f"{per_node}; choose a multiple, or change cluster.gpus_per_node"
        )
    if cluster.executor == "local":
        if nodes > 1:
            raise ConfigError(
                f"models.{name}.parallel asks for {experiment.world_size} processes and cluster.executor is local with "
                f"{per_node} per node; use executor: slurm, or raise cluster.gpus_per_node or tasks_per_node"
            )
        return {
            "tasks_per_node": tasks,
            "stderr_to_stdout": True,
            "gpus_per_node": tasks if cluster.gpus_per_node else 0,
            "timeout_min": experiment.time_limit_minutes,
        }
    parameters: dict[str, Any] = {
        "name": name,
        "nodes": nodes,
        "tasks_per_node": tasks,
        "cpus_per_task": cluster.cpus_per_task,
        "mem_gb": cluster.mem_gb_per_task * tasks,
        "timeout_min": experiment.time_limit_minutes,
        "stderr_to_stdout": True,
        # By default srun leaves the other ranks waiting for a dead one, and does not take the CPU count from sbatch.
        "slurm_srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cluster.cpus_per_task}"],
    }
    if cluster.gpus_per_node:
        parameters["slurm_gres"] = f"gpu:{tasks}"
    if cluster.partition:
        parameters["slurm_partition"] = cluster.partition
    if cluster.account:
        parameters["slurm_account"] = cluster.account
    return parameters


def _executor(kind: str, logs: Path, parameters: dict[str, Any]) -> Any:
    import submitit

    if kind == "slurm" and submitit.SlurmExecutor.affinity() < 0:
        raise InputError("srun: no such command; run this on a login node, or set cluster.executor: local")
    executor = submitit.AutoExecutor(folder=logs, cluster=kind)
    executor.update_parameters(**parameters)
    return executor


def submit(settings: Settings, name: str) -> Job:
    """Start the training job of a model, or return the one that is still alive."""
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "submit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two concurrent submissions, the second finds the first one's job
        job = read_job(folder)
        if job is not None and is_alive(job):
            print(f"{name}: job {job.id} is still alive; not submitted again")
            return job
        (folder / "done.json").unlink(missing_ok=True)  # it must mean that *this* job has finished
        logs = folder / "logs"
        experiment, cluster = settings.models[name], settings.cluster
        executor = _executor(cluster.executor, logs, job_parameters(name, experiment, cluster))
        submitted = executor.submit(run_training, settings.model_dump(mode="json"), name, str(Path.cwd()))
        job = Job(id=str(submitted.job_id), executor=cluster.executor, logs=str(logs))
        write_job(folder, job)
        print(f"{name}: submitted job {job.id} ({experiment.world_size} processes), logs in {logs}")
        return job


def wait(name: str, folder: Path, job: Job) -> None:
    """Wait for the job of a model folder; print its newest log line every 30 s. Raises JobError if it failed."""
    done = folder / "done.json"
    printed = time.monotonic()
    while is_alive(job):
        time.sleep(_POLL[job.executor])
        if time.monotonic() - printed >= LOG_INTERVAL:
            printed = time.monotonic()
            path, lines = log_tail(job, 1)
            print(lines[-1] if lines else f"{name}: job {job.id} has written nothing yet", flush=True)
    if not done.exists():
        path, lines = log_tail(job)
        quoted = "".join(f"\n    {line}" for line in lines)
        raise JobError(f"{name}: job {job.id} ended before training was done; log: {path or job.logs}{quoted}")
    print(f"{name}: done, {done}")


def describe(settings: Settings, name: str) -> str:
    """The job that would be submitted, one line per parameter."""
    rows = {
        "model folder": settings.model_folder(name),
        "executor": settings.cluster.executor,
        "processes": settings.models[name].world_size,
        **job_parameters(name, settings.models[name], settings.cluster),
    }
    return text_table(rows.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.submit", __doc__)
    cli.add_model_settings(parser)
    parser.add_argument("--wait", action="store_true", help="wait for the job to end")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if arguments.dry_run:
        print(describe(settings, arguments.model))
        return 0
    job = submit(settings, arguments.model)
    if arguments.wait:
        wait(arguments.model, settings.model_folder(arguments.model), job)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
