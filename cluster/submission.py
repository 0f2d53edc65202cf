"""Starts the processes of a training job through submitit, on Slurm or on this machine.

    start(settings, TrainingJob(f"{snapshot}/settings.yaml", "tiny", requeue=False), 60)

Every rank runs a `TrainingJob` from a snapshot of the code. submitit writes the batch script (SlurmExecutor) or starts
the ranks here (LocalExecutor). We add two things to the script: the ranks' PYTHONPATH, and a trap that decides at the
end whether the job is requeued.

submitit runs from the snapshot in a process with its own session. Ctrl-C, a closed terminal or a killed
`cluster.submit` therefore cannot interrupt it between sbatch and the job's record, nor end a job on this machine.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import submitit
from submitit.helpers import DelayedSubmission

from cluster import slurm
from cluster.jobs import Job, State, read_job, read_state, write_job, write_state
from cluster.training_job import TrainingJob
from common import cli, run_card
from common.config import load_settings, settings_text
from common.errors import ConfigError, InputError
from common.files import write_text
from common.files.writing import replace_folder
from common.settings import ClusterSettings, Experiment, Settings
from training.model_folder import newest_iteration, stop_file, stopped_mark
from training.planning.machines import processes_of

_LONGEST_SIGNAL = 4  # the signal to save comes at most 1 / 4 of the time limit before the end
_KILL_WAIT = 10.0  # seconds between SIGTERM and SIGKILL
PACKAGES = ("common", "corpus", "training", "cluster", "workflow")
"""Packages that a training job imports."""
_ROOT = Path(__file__).resolve().parents[1]
_JOB_END = """\
# The shell outlives the signals that Slurm sends to the whole job: it waits for the ranks, then job_end
# records how they ended and requeues the job if it should continue.
trap : TERM USR2 HUP
job_end() {{ code=$?; trap "" TERM USR2 HUP; {command} --code $code; exit $?; }}
trap job_end EXIT"""


def start(settings: Settings, job: TrainingJob, minutes: int, keep_open: Sequence[int] = ()) -> Job:
    """Submit the job to Slurm or start it here, and record it. Raises InputError if it is refused.

    `minutes`: the time limit; `keep_open`: file descriptors that the submitting process inherits, such as a lock that
    must outlive this process.
    """
    logs = _logs(settings, job.model)
    logs.mkdir(parents=True, exist_ok=True)
    DelayedSubmission(job).dump(_pickle(job))
    command = [sys.executable, "-m", "cluster.submission", str(_pickle(job)), str(minutes)]
    environment = {**slurm.environment(settings.cluster), **_environment(Path(job.config).parent)}
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
    make = _local_executor if settings.cluster.executor == "local" else slurm_executor
    executor = make(settings, job, minutes)
    try:
        number = str(executor.submit(job).job_id)
    except submitit.core.utils.FailedJobError as error:
        raise slurm.RefusedError(str(error)) from None
    finally:  # what submitit leaves if Slurm refuses the job, and a link to the script if it does not
        for path in [*executor.folder.glob(".submission_file_*.sh"), *executor.folder.glob("?" * 32 + ".pkl")]:
            path.unlink()
    folder = executor.folder.parent
    remove_marks(folder, _pickle(job).stat().st_mtime_ns)  # only now: a refusal changes nothing
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


def slurm_executor(settings: Settings, job: TrainingJob, minutes: int) -> "_SlurmExecutor":
    """The executor that submits a job to Slurm, with all parameters; `minutes`: the time limit."""
    cluster, logs, snapshot = settings.cluster, _logs(settings, job.model), Path(job.config).parent
    nodes, tasks = nodes_and_tasks(job.model, settings.models[job.model], cluster)
    gres = cluster.gres or "gpu"
    cpus = cluster.cpus_per_task or 1
    if cluster.gpus_per_node and not cluster.cpus_per_task:
        cpus = slurm.cores_per_gpu(gres, tasks, cluster.partition)
    setup = [f"export {key}={shlex.quote(value)}" for key, value in _environment(snapshot).items()]
    # submitit puts the pickle in its place after sbatch, unless it is killed in between
    pickle = shlex.quote(f"{logs}/") + '"$SLURM_JOB_ID"_submitted.pkl'
    setup += [f"[ -e {pickle} ] || cp {shlex.quote(str(_pickle(job)))} {pickle}", *cluster.setup]
    if job.module == TrainingJob.module:
        options = ["--folder", str(logs.parent), "--max-restarts", str(cluster.max_restarts)]
        setup.append(_JOB_END.format(command=shlex.join([sys.executable, "-m", "cluster.job_end", *options])))
    site = dict(option.removeprefix("--").partition("=")[::2] for option in slurm.site_options(cluster))
    log = str(logs).replace("%", "%%") + "/%j_%t_log.out"  # submitit does not double Slurm's percent signs
    doubled = "%" in str(logs)
    container = f"{shlex.join(shlex.split(cluster.container))} python" if cluster.container else None
    # By default srun leaves the other ranks waiting for a dead one, does not take the CPU count from sbatch, overwrites
    # the logs of the job's earlier starts, and drops the exports above where SBATCH_EXPORT is NONE.
    srun = ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "--open-mode=append", "--export=ALL"]
    executor = _SlurmExecutor(logs, python=container)
    executor.update_parameters(
        job_name=job_name(settings, job.model),
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
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
            **({} if "no-requeue" in site else {"requeue": True}),
            **{key.replace("-", "_"): value or True for key, value in site.items()},
        },
    )
    return executor


class _SlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's executor with our sbatch command, by the methods that submitit's plugin guide names."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # a dry run needs no Slurm

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*slurm.SBATCH, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return slurm.job_id(string if isinstance(string, str) else string.decode())

    def batch_script(self) -> str:
        """The script that `submit` passes to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))


def _local_executor(settings: Settings, job: TrainingJob, minutes: int) -> submitit.LocalExecutor:
    """The executor that starts the ranks on this machine."""
    _, tasks = nodes_and_tasks(job.model, settings.models[job.model], settings.cluster)
    executor = submitit.LocalExecutor(_logs(settings, job.model))
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

    Raises ConfigError if the processes do not fill whole nodes, or if the local executor needs more than one node.
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


def job_name(settings: Settings, name: str) -> str:
    """RUN-MODEL-HASH: readable in squeue, and unique for the model folder."""
    folder = settings.model_folder(name).resolve()
    readable = re.sub(r"[^\w.-]+", "_", f"{folder.parents[1].name}-{name}")
    return f"{readable}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def make_snapshot(settings: Settings, folder: Path) -> Path:
    """Copy the code and the settings to FOLDER/snapshots/DIGEST, named by their content; returns that folder.

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


def _environment(snapshot: Path) -> dict[str, str]:
    """The variables that make Python import the snapshot's code, regardless of the working directory."""
    code, inherited = str(snapshot / "code"), os.environ.get("PYTHONPATH", "")
    path = code if inherited in ("", code) else f"{code}{os.pathsep}{inherited}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _pickle(job: TrainingJob) -> Path:
    """The job's pickle in the snapshot."""
    return Path(job.config).with_name(f"{job.model}.pkl")


def _logs(settings: Settings, name: str) -> Path:
    """The folder of a model's logs. Raises ConfigError if submitit would write elsewhere."""
    folder = settings.model_folder(name).resolve() / "logs"
    if match := re.search("%[jtAa]", str(folder)):
        raise ConfigError(f"run: {folder}: submitit replaces {match[0]} in the names of folders; rename the folder")
    return folder


def end(job: Job) -> None:
    """Cancel a job: on Slurm, or its local controller and all processes below that, as scancel does.

    Raises JobError if Slurm's controller refuses.
    """
    if job.executor == "slurm":
        slurm.cancel([job.id])
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(job.id))
        processes = [*process.children(recursive=True), process]
        for child in processes:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(processes, _KILL_WAIT)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Run submitit in this process, which `start` starts."""
    pickle, minutes = argv or sys.argv[1:]
    submit_here(DelayedSubmission.load(pickle).function, int(minutes))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
