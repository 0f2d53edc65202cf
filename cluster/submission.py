"""What submitit runs for a training job: its batch script and its local controller, with our command, not a pickle.

Every rank runs `python -m training.train` from the snapshot. A pickle would be moved to its place only after sbatch,
so a submitter that is killed in between would leave a job that cannot start; and submitit's runner installs signal
handlers that answer a time limit while Python still imports torch.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from cluster import slurm
from common.settings import ClusterSettings

_LONGEST_SIGNAL = 4  # a job is told to save at most 1 / 4 of its time limit before the end
_KILL_WAIT = 10.0  # seconds between SIGTERM and SIGKILL


def rank_command(
    snapshot: Path, name: str, container: str = "", module: str = "training.train", options: Sequence[str] = ()
) -> str:
    """The command line of one rank: the trainer, or another module with more options, from a snapshot."""
    settings = ["--config", str(snapshot / "settings.yaml"), "--model", name]
    python = [*shlex.split(container), "python"] if container else [sys.executable]
    return shlex.join([*python, "-u", "-m", module, *settings, *options])


def python_path(snapshot: Path) -> dict[str, str]:
    """The environment in which Python imports the snapshot's code, whatever the working directory holds."""
    inherited = os.environ.get("PYTHONPATH", "")
    code = str(snapshot / "code")
    return {"PYTHONPATH": f"{code}{os.pathsep}{inherited}" if inherited else code, "PYTHONSAFEPATH": "1"}


class _SlurmExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's, which also writes a batch script where there is no Slurm: `cluster.submit --dry-run` on a laptop."""

    @classmethod
    def affinity(cls) -> int:
        """How much submitit prefers this executor; it refuses one below 1."""
        return 1


def slurm_executor(
    logs: Path, name: str, nodes: int, tasks: int, minutes: int, cluster: ClusterSettings, setup: Sequence[str]
) -> SlurmExecutor:
    """submitit's executor for a Slurm job called `name`: `tasks` processes on each of `nodes` nodes, for `minutes`.

    `setup`: shell commands that the batch script runs before srun.
    """
    cpus = cluster.cpus_per_task or 1
    executor = _SlurmExecutor(logs)
    executor.update_parameters(
        job_name=name,
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cpus,
        time=minutes,
        signal_delay_s=min(cluster.signal_seconds, minutes * 60 // _LONGEST_SIGNAL),
        stderr_to_stdout=True,
        wckey=None,
        gres=f"{cluster.gres or 'gpu'}:{tasks}" if cluster.gpus_per_node else None,
        mem=f"{cluster.mem_gb_per_task * tasks}G" if cluster.mem_gb_per_task else None,
        additional_parameters=_directives(["--requeue", *slurm.site_options(cluster)]),
        setup=list(setup),
        # By default srun leaves the other ranks waiting for a dead one, does not take the CPU count from sbatch, and
        # overwrites the logs of the job's earlier starts.
        srun_args=["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "--open-mode=append"],
    )
    return executor


def _directives(options: Sequence[str]) -> dict[str, Any]:
    """Command-line options as submitit's parameters: --qos=high is {"qos": "high"}, --exclusive {"exclusive": True}."""
    pairs = (option.removeprefix("--").partition("=") for option in options)
    return {key: value if equals else True for key, equals, value in pairs}


def batch_script(executor: SlurmExecutor, command: str) -> str:
    """The text that sbatch gets."""
    return f"{executor._make_submission_file_text(command, '')}\n"


def submit_to_slurm(executor: SlurmExecutor, command: str, keep_open: Sequence[int]) -> str:
    """Submit the batch script, and keep it beside the logs; returns the job id."""
    logs = Path(executor.folder)
    logs.mkdir(parents=True, exist_ok=True)
    script = logs / f"{os.getpid()}.sh"
    script.write_text(batch_script(executor, command), encoding="utf-8")
    job = slurm.submit(script, keep_open)
    script.rename(JobPaths(logs, job).submission_file)
    return job


def start_here(logs: Path, tasks: int, minutes: int, gpus: int, command: str, environment: Mapping[str, str]) -> str:
    """Start the ranks on this machine under submitit's local controller; returns its process id."""
    variables = dict(environment)
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES"):
        variables["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]  # submitit would count from 0
    executor = LocalExecutor(logs)
    executor.update_parameters(tasks_per_node=tasks, gpus_per_node=gpus, timeout_min=minutes, stderr_to_stdout=True)
    settings = [f"{key}={value}" for key, value in variables.items()]
    with _detached(logs / "controller.out"):
        return str(executor._submit_command(f"env {shlex.join(settings)} {command}").job_id)


@contextmanager
def _detached(output: Path) -> Iterator[None]:
    """What is started inside ignores Ctrl-C and hang-ups, and has no terminal or pipe of ours, only a file.

    The controller would answer Ctrl-C by killing the ranks; a pipe (`cluster.submit | tee`) would stay open until the
    training ends.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    ours = [os.dup(descriptor) for descriptor in range(3)]
    try:
        with open(os.devnull) as nothing, output.open("a") as file:
            for descriptor, replacement in enumerate((nothing, file, file)):
                os.dup2(replacement.fileno(), descriptor)
            yield
    finally:
        for descriptor, copy in enumerate(ours):
            os.dup2(copy, descriptor)
            os.close(copy)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_here(controller: str) -> None:
    """Ask the ranks of a local controller to save and stop; it passes the signal on."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(controller)).terminate()


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
