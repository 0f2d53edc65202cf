"""Check the nodes of a training job without training: devices, memory, clocks, disk, network.

    python -m cluster.preflight --config config.yaml --model tiny
    srun --nodes 2 --ntasks-per-node 8 --gres gpu:8 python -m cluster.preflight --config run.yaml --model gpt2_345m

It submits a job of the model's shape, to Slurm or on this machine, and prints its table: one row per node. A node that
cannot run the job is named, with exit code 2. Under srun or torchrun it is one process of such a job. Every training
makes the same checks before its first step.
"""

import sys
import time
from collections.abc import Sequence

from cluster import slurm, submission
from cluster.jobs import Job, log_path, look
from cluster.snapshot import make_snapshot
from cluster.submit import Launch, job_name
from common import cli
from common.errors import JobError
from common.settings import Settings
from training.leaving import leave_at_once
from training.parallel.launch import read_launch
from training.parallel.preflight import run_preflight
from training.parallel.process_group import before_start
from training.planning.this_machine import processes_of

_MINUTES = 10  # the job's time limit: the checks take seconds, importing torch on a cold file system minutes
_POLL = 1.0


def submit(settings: Settings, name: str) -> int:
    """Run the checks as a job of its own, and print what its first process prints; returns the exit code."""
    folder = settings.model_folder(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = make_snapshot(settings, folder)
    launch = Launch(settings, name, snapshot, f"{job_name(settings, name)}-preflight", "cluster.preflight", _MINUTES)
    job = Job(launch.start(), settings.cluster.executor, str(folder / "logs"))
    print(f"{name}: job {job.id}", flush=True)
    try:
        while (known := look([job])) is None or (job.id in known and known[job.id].active):
            if known and known[job.id].hopeless:
                raise JobError(f"{name}: {slurm.never_starts(known[job.id])}")
            time.sleep(_POLL)
    except BaseException:
        if job.executor == "slurm":
            slurm.cancel([job.id])
        else:
            submission.kill_here(job.id)
        raise
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
    launch = read_launch()
    with before_start(launch):
        settings = cli.read_settings(arguments)
    processes = processes_of(settings.models[arguments.model], settings.cluster)
    if launch.launcher == "single" and (settings.cluster.executor == "slurm" or processes > 1):
        return submit(settings, arguments.model)
    return run_preflight(settings, arguments.model)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main))
