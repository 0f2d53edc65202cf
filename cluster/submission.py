"""Starts the processes of a training job, on Slurm or on this machine: the shape of the job, its command, its script.

Every rank runs `python -m training.train` from a snapshot of the code. On Slurm we write the batch script ourselves,
as for corpus jobs: what submitit offers for it is private, and its public way, a pickled function, puts the pickle in
its place only after sbatch (a submitter that is killed in between leaves a job that cannot start) and answers a time
limit with handlers of its own while Python still imports torch. On this machine submitit's controller starts the ranks.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster import slurm
from cluster.jobs import Job
from common import run_card
from common.config import settings_text
from common.errors import ConfigError
from common.files import write_text
from common.settings import ClusterSettings, Experiment, Settings
from training.planning.machines import processes_of

_LONGEST_SIGNAL = 4  # a job is told to save at most 1 / 4 of its time limit before the end
_KILL_WAIT = 10.0  # seconds between SIGTERM and SIGKILL
PACKAGES = ("common", "corpus", "training", "cluster", "workflow")
"""What a training job imports."""
_ROOT = Path(__file__).resolve().parents[1]
_START = """
import json, sys
from submitit.local.local import start_controller
print(start_controller(**json.loads(sys.argv[1])).pid)
"""


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


def make_snapshot(settings: Settings, folder: Path) -> Path:
    """Copy the code and the settings into a model folder, to FOLDER/snapshots/DIGEST; returns that folder.

    A job and its restarts run the copy: editing sources or configuration does not change a job in the queue. The digest
    is that of the content.
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
        building = snapshot.with_name(f"{snapshot.name}.tmp")  # one submitter at a time
        shutil.rmtree(building, ignore_errors=True)
        for package in PACKAGES:
            shutil.copytree(_ROOT / package, building / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
        write_text(building / "settings.yaml", text)
        write_text(building / "code" / run_card.COMMIT, run_card.commit(_ROOT) or "")
        building.rename(snapshot)
    return snapshot


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
    def logs(self) -> Path:
        """The folder of the job's logs."""
        return self.settings.model_folder(self.model).resolve() / "logs"

    @property
    def shape(self) -> tuple[int, int]:
        """See `nodes_and_tasks`."""
        return nodes_and_tasks(self.model, self.settings.models[self.model], self.settings.cluster)

    @property
    def command(self) -> str:
        """The command line of one process."""
        container = self.settings.cluster.container
        python = [*shlex.split(container), "python"] if container else [sys.executable]
        settings = ["--config", str(self.snapshot / "settings.yaml"), "--model", self.model]
        return shlex.join([*python, "-u", "-m", self.module, *settings, *self.options])

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Python imports the snapshot's code, whatever the working directory holds."""
        code, inherited = str(self.snapshot / "code"), os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{code}{os.pathsep}{inherited}" if inherited else code, "PYTHONSAFEPATH": "1"}

    def script(self) -> str:
        """The batch script of the Slurm job."""
        cluster, (nodes, tasks) = self.settings.cluster, self.shape
        gres = cluster.gres or "gpu"
        cpus = cluster.cpus_per_task or 1
        if cluster.gpus_per_node and not cluster.cpus_per_task:
            cpus = slurm.cores_per_gpu(gres, tasks, cluster.partition)
        logs = str(self.logs).replace("%", "%%")
        options = [
            f"--job-name={self.name}",
            f"--nodes={nodes}",
            f"--ntasks-per-node={tasks}",
            f"--cpus-per-task={cpus}",
            *([f"--gres={gres}:{tasks}"] if cluster.gpus_per_node else []),
            *([f"--mem={cluster.mem_gb_per_task * tasks}G"] if cluster.mem_gb_per_task else []),
            f"--time={self.minutes}",
            f"--signal=USR2@{min(cluster.signal_seconds, self.minutes * 60 // _LONGEST_SIGNAL)}",
            f"--output={logs}/%j_0_log.out",
            "--open-mode=append",
            "--requeue",
            *slurm.site_options(cluster),
        ]
        # By default srun leaves the other ranks waiting for a dead one, does not take the CPU count from sbatch, and
        # overwrites the logs of the job's earlier starts.
        srun = ["srun", "--unbuffered", "--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "--open-mode=append"]
        srun.append(f"--output={logs}/%j_%t_log.out")
        return slurm.batch_script(
            options, self.environment, [*cluster.setup, *self.at_end, f"{shlex.join(srun)} {self.command}"]
        )

    def start(self, keep_open: Sequence[int] = ()) -> str:
        """Start the processes, on Slurm or here; returns the id of the job. `keep_open`: see `slurm.submit`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        if self.settings.cluster.executor == "local":
            return self._start_here()
        script = self.logs / f"{os.getpid()}.sh"
        script.write_text(self.script(), encoding="utf-8")
        job = slurm.submit(script, keep_open)
        script.rename(self.logs / f"{job}_submission.sh")
        return job

    def _start_here(self) -> str:
        """Start the ranks on this machine under submitit's local controller; returns its process id.

        The controller has a session of its own, so that Ctrl-C and a closed terminal do not reach it, and no pipe of
        ours (`cluster.submit | tee`), only a file.
        """
        _, tasks = self.shape
        gpus = ",".join(map(str, range(tasks))) if self.settings.cluster.gpus_per_node else ""
        options = {
            "folder": str(self.logs),
            "command": self.command,
            "tasks_per_node": tasks,
            "cuda_devices": (os.environ.get("CUDA_VISIBLE_DEVICES") or gpus) if gpus else "",
            "timeout_min": self.minutes,
            "stderr_to_stdout": True,
        }
        command, environment = [sys.executable, "-c", _START, json.dumps(options)], {**os.environ, **self.environment}
        with (self.logs / "controller.out").open("w+") as output:
            null, both = subprocess.DEVNULL, subprocess.STDOUT
            subprocess.run(
                command, env=environment, stdin=null, stdout=output, stderr=both, start_new_session=True, check=True
            )
            output.seek(0)
            return str(re.findall(r"^\d+$", output.read(), re.MULTILINE)[0])


def end(job: Job) -> None:
    """End a job, wherever it runs. Raises JobError if the controller refuses."""
    if job.executor == "local":
        kill_here(job.id)
    else:
        slurm.cancel([job.id])


def kill_here(controller: str) -> None:
    """End a local controller and all processes below it: SIGTERM, then SIGKILL, as scancel does."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(controller))
        processes = [*process.children(recursive=True), process]
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        for one in psutil.wait_procs(processes, _KILL_WAIT)[1]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
