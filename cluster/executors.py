"""submitit's executors for a training job: the batch script on Slurm, the processes on this
machine.

Added to submitit's script: the ranks' PYTHONPATH, and a trap that decides at the end whether the
job is requeued.
"""

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path

import submitit

from cluster import slurm
from cluster.training_job import TrainingJob, TrialJob
from common.errors import ConfigError
from common.settings import ClusterSettings, Experiment, Settings
from training.planning.elastic import process_counts
from training.planning.machines import processes_of

_LONGEST_SIGNAL = 4  # the signal to save comes at most 1 / 4 of the time limit before the end
# Slurm has given MIN to MAX nodes. A node that the batch cannot use is given back, if the site
# allows that (disable_job_shrink); Slurm writes how the variables change to the current folder.
_USABLE_NODES = """\
for nodes in {counts}; do [ "$nodes" -gt "$SLURM_JOB_NUM_NODES" ] || break; done
if [ "$nodes" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "$SLURM_JOB_NUM_NODES nodes: the global batch divides over $nodes"
    pushd {logs} >/dev/null
    scontrol update JobId=$SLURM_JOB_ID NumNodes=$nodes && . ./slurm_job_"$SLURM_JOB_ID"_resize.sh
    rm -f slurm_job_"$SLURM_JOB_ID"_resize.{{sh,csh}}
    popd >/dev/null
fi
export SLURM_NNODES=$nodes SLURM_JOB_NUM_NODES=$nodes
export SLURM_NTASKS=$((nodes * {tasks})) SLURM_NPROCS=$((nodes * {tasks}))"""
_JOB_END = """\
# The shell outlives the signals that Slurm sends to the whole job: it waits for the ranks, then
# job_end records how they ended and requeues the job if it should continue.
trap : TERM USR2 HUP
job_end() {{ code=$?; trap "" TERM USR2 HUP; {command} --code $code; exit $?; }}
trap job_end EXIT"""


def slurm_executor(settings: Settings, job: TrainingJob, minutes: int) -> "_SlurmExecutor":
    """The executor that submits a job to Slurm, with all parameters; `minutes`: the time limit."""
    cluster, logs, snapshot = settings.cluster, logs_folder(settings, job.model), Path(job.config).parent
    counts, tasks = node_counts(job.model, settings.models[job.model], cluster)
    gres = cluster.gres or "gpu"
    cpus = cluster.cpus_per_task or 1
    if cluster.gpus_per_node and not cluster.cpus_per_task:
        cpus = slurm.cores_per_gpu(gres, tasks, cluster.partition)
    setup = [f"export {key}={shlex.quote(value)}" for key, value in snapshot_environment(snapshot).items()]
    # submitit puts the pickle in its place after sbatch, unless it is killed in between
    pickle = shlex.quote(f"{logs}/") + '"$SLURM_JOB_ID"_submitted.pkl'
    setup += [f"[ -e {pickle} ] || cp {shlex.quote(str(pickle_of(job)))} {pickle}", *cluster.setup]
    if len(counts) > 1:
        numbers = " ".join(map(str, counts))
        setup.append(_USABLE_NODES.format(counts=numbers, tasks=tasks, logs=shlex.quote(str(logs))))
    if not isinstance(job, TrialJob):
        options = ["--folder", str(logs.parent), "--max-restarts", str(cluster.max_restarts)]
        setup.append(_JOB_END.format(command=shlex.join([sys.executable, "-m", "cluster.job_end", *options])))
    site = dict(option.removeprefix("--").partition("=")[::2] for option in slurm.site_options(cluster))
    log = str(logs).replace("%", "%%") + "/%j_%t_log.out"  # submitit does not double Slurm's percent signs
    doubled = "%" in str(logs)
    container = f"{shlex.join(shlex.split(cluster.container))} python" if cluster.container else None
    # By default srun leaves the other ranks waiting for a dead one, does not take the CPU count
    # from sbatch, overwrites the logs of the job's earlier starts, and drops the exports above
    # where SBATCH_EXPORT is NONE.
    srun = ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "--open-mode=append", "--export=ALL"]
    # A requeued job with --ntasks-per-node keeps its last number of nodes. With a range of nodes
    # the job therefore has one large task per node, and srun starts the ranks.
    cpus_of_task = cpus * tasks if len(counts) > 1 else cpus
    if len(counts) > 1:
        srun.append(f"--ntasks-per-node={tasks}")
    executor = _SlurmExecutor(logs, python=container)
    executor.update_parameters(
        job_name=job_name(settings, job.model),
        nodes=counts[0],
        ntasks_per_node=None if len(counts) > 1 else tasks,
        cpus_per_task=cpus_of_task,
        gres=f"{gres}:{tasks}" if cluster.gpus_per_node else None,
        mem=f"{cluster.mem_gb_per_task * tasks}G" if cluster.mem_gb_per_task else None,
        time=minutes,
        wckey=None,  # a cluster that enforces wckeys refuses submitit's
        stderr_to_stdout=True,
        setup=setup,
        srun_args=[*srun, *[f"--output={log}"] * doubled],
        additional_parameters={
            "signal": f"USR2@{min(cluster.signal_seconds, minutes * 60 // _LONGEST_SIGNAL)}",
            **({"output": log.replace("%t", "0")} if doubled else {}),
            **({"nodes": f"{counts[-1]}-{counts[0]}"} if len(counts) > 1 and not cluster.shrink_after_minutes else {}),
            **({} if "no-requeue" in site else {"requeue": True}),
            **{key.replace("-", "_"): value or True for key, value in site.items()},
        },
    )
    return executor


class _SlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's executor with our sbatch command (methods of its plugin guide)."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # a dry run needs no Slurm

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*slurm.SBATCH, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return slurm.job_id(string if isinstance(string, str) else string.decode())

    def _num_tasks(self) -> int:
        return 1  # the number of a range of nodes is unknown, and nobody reads results of tasks

    def batch_script(self) -> str:
        """The script that `submit` passes to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))


def local_executor(settings: Settings, job: TrainingJob, minutes: int) -> submitit.LocalExecutor:
    """The executor that starts the ranks on this machine."""
    _, tasks = nodes_and_tasks(job.model, settings.models[job.model], settings.cluster)
    executor = submitit.LocalExecutor(logs_folder(settings, job.model))
    executor.update_parameters(tasks_per_node=tasks, timeout_min=minutes, stderr_to_stdout=True)
    if settings.cluster.gpus_per_node:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(tasks)))
        try:
            executor.update_parameters(gpus_per_node=tasks, visible_gpus=tuple(map(int, visible.split(","))))
        except ValueError:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible}: give {tasks} numbers, such as 0,1") from None
    return executor


def nodes_and_tasks(name: str, experiment: Experiment, cluster: ClusterSettings) -> tuple[int, int]:
    """(nodes, processes per node) of model `name`: the fewest nodes, all of them full.

    Raises ConfigError if the processes do not fill whole nodes, or if the local executor needs more
    than one node.
    """
    per_node = cluster.gpus_per_node or cluster.tasks_per_node
    processes = processes_of(experiment, cluster)
    tasks = min(processes, per_node)
    nodes, rest = divmod(processes, tasks)
    needs = f"models.{name}.parallel asks for {processes} processes"
    if rest:
        raise ConfigError(
            f"{needs}, which do not fill whole nodes of {per_node}; choose a multiple, or change cluster.gpus_per_node"
        )
    if cluster.executor == "local" and nodes > 1:
        raise ConfigError(
            f"{needs} and cluster.executor is local with {per_node} per node; use executor: slurm, or raise "
            "cluster.gpus_per_node or tasks_per_node"
        )
    return nodes, tasks


def node_counts(name: str, experiment: Experiment, cluster: ClusterSettings) -> tuple[list[int], int]:
    """The numbers of nodes on which model `name` may start, largest first; processes per node.

    Raises ConfigError as `nodes_and_tasks` and `process_counts` do.
    """
    _, tasks = nodes_and_tasks(name, experiment, cluster)
    return [count // tasks for count in process_counts(name, experiment, cluster)], tasks


def job_name(settings: Settings, name: str) -> str:
    """RUN-MODEL-HASH: readable in squeue, and unique for the model folder."""
    folder = settings.model_folder(name).resolve()
    readable = re.sub(r"[^\w.-]+", "_", f"{folder.parents[1].name}-{name}")
    return f"{readable}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def snapshot_environment(snapshot: Path) -> dict[str, str]:
    """Variables with which Python imports the snapshot's code, from any working directory."""
    code, inherited = str(snapshot / "code"), os.environ.get("PYTHONPATH", "")
    path = code if inherited in ("", code) else f"{code}{os.pathsep}{inherited}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def pickle_of(job: TrainingJob) -> Path:
    """The job's pickle in the snapshot."""
    return Path(job.config).with_name(f"{job.model}.pkl")


def logs_folder(settings: Settings, name: str) -> Path:
    """The folder of a model's logs. Raises ConfigError if submitit would write elsewhere."""
    folder = settings.model_folder(name).resolve() / "logs"
    if match := re.search("%[jtAa]", str(folder)):
        raise ConfigError(f"run: {folder}: submitit replaces {match[0]} in the names of folders; rename the folder")
    return folder
