"""What a shard costs on Slurm besides its own work: ours beside Snakemake's Slurm plugin and a plain sbatch array.

    python -m tests.slurm.lab -- python -m benchmarks.corpus workflow

Every shard sleeps for a second. "Overhead in jobs" is the run time of all Slurm jobs, as Slurm reports it in whole
seconds, minus the sleeping, per shard; time in the queue does not count.
"""

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.harness import Contender, Row, Timed, compare

_SNAKEFILE = """
from workflow import snakefile
settings = snakefile.read_settings(workflow)
onstart:
    snakefile.prepare_run(settings)
rule all:
    default_target: True
    input: expand("results/x/{s}", s=range(settings.shards))
rule shard:
    output: "results/x/{s}"
    shell: "sleep 1; touch {output:q}"
"""


def _array(shards: int, tasks: int) -> list[str]:
    """A plain array, in which each task loops over its shards."""
    loop = f"for i in $(seq {-(-shards // tasks)}); do sleep 1; done"
    return ["sbatch", "--wait", "--mem=100", "--time=10", "--output=/dev/null", f"--array=1-{tasks}", f"--wrap={loop}"]


def _snakemake(*options: str) -> list[str]:
    asked = ["--default-resources", "mem_mb=100", "runtime=10", "--latency-wait", "10", "--jobs", "unlimited"]
    return [sys.executable, "-m", "snakemake", "--quiet", "all", *options, *asked]


def _jobs() -> dict[str, float]:
    """The run time of each Slurm job of this user, in seconds, by id."""
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%S|%e"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split("|") for line in lines if "N/A" not in line]
    moments = {job: [datetime.fromisoformat(text) for text in texts] for job, *texts in rows}
    return {job: (end - start).total_seconds() for job, (start, end) in moments.items()}


def way(command: list[str], shards: int, tasks: int) -> Timed:
    """One way to run the shards, in a folder of its own."""

    def run() -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            Path(folder, "Snakefile").write_text(_SNAKEFILE)
            Path(folder, "urls.txt").write_text("http://site.example/\n")
            config = {"run": "results/x", "urls": ["urls.txt"], "shards": shards}
            config["cluster"] = {"corpus": {"max_tasks": tasks}}
            Path(folder, "config.yaml").write_text(yaml.safe_dump(config))
            before = _jobs()
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            time.sleep(2)  # the controller notes the last end
        ran = {job: seconds for job, seconds in _jobs().items() if job not in before}
        return {"Slurm jobs": len(ran), "overhead in jobs, s per shard": sum(ran.values()) / shards - 1}

    return run


def measure(arguments: Namespace) -> Iterator[Row]:
    """One row per way to run the shards."""
    shards, tasks = arguments.count, min(8, arguments.count)
    commands = {
        "plain array, one shard per task": _array(shards, shards),
        f"plain array of {tasks} tasks": _array(shards, tasks),
        f"slurm-batch, array of {tasks} tasks": _snakemake("--executor", "slurm-batch", "--scheduler", "in-order"),
    }
    if find_spec("snakemake_executor_plugin_slurm"):
        stock = _snakemake("--executor", "slurm", "--slurm-status-command", "squeue")
        commands["Snakemake's plugin, one job per shard"] = stock
    contenders = [Contender(label, way, (command, shards, tasks)) for label, command in commands.items()]
    yield from compare(f"{shards} shards of 1 s", contenders, 1, shards, "shards")
