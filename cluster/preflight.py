"""Check the nodes of a training job without training: devices, memory, disk, network.

    python -m cluster.preflight --config config.yaml --model tiny
    srun --nodes 2 --ntasks-per-node 8 --gres gpu:8 python -m cluster.preflight --config run.yaml --model gpt2_345m

It submits a job of the model's shape, to Slurm or on this machine, and prints its table: one row per node. A node that
cannot run the job is named, with exit code 2. Under srun or torchrun it is one process of such a job. Every training
makes the same checks before its first step.
"""

import sys
from collections.abc import Sequence

from cluster.jobs import log_path
from cluster.snapshot import make_snapshot
from cluster.submission import Launch, job_name, run_to_end
from common import cli
from common.errors import JobError
from common.settings import Settings
from training.launch.preflight import run_preflight
from training.launch.rank import read_launch
from training.launch.signals import leave_at_once
from training.planning.machines import processes_of

_MINUTES = 10  # the job's time limit: the checks take seconds, importing torch on a cold file system minutes


def submit(settings: Settings, name: str) -> int:
    """Run the checks as a job of its own, and print what its first process prints; returns the exit code."""
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = make_snapshot(settings, folder)
    launch = Launch(settings, name, snapshot, f"{job_name(settings, name)}-preflight", "cluster.preflight", _MINUTES)
    job, _ = run_to_end(launch)
    path = log_path(job)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    print(text, end="")
    if "preflight\n" not in text or "error: " in text:
        raise JobError(f"{name}: the preflight failed; logs: {path.parent}/{job.id}_*")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.preflight", __doc__)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    processes = processes_of(settings.models[arguments.model], settings.cluster)
    if read_launch().launcher == "single" and (settings.cluster.executor == "slurm" or processes > 1):
        return submit(settings, arguments.model)
    return run_preflight(settings, arguments.model)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main))
