"""What a shard costs on Slurm besides its own work: ours beside Snakemake's Slurm plugin and a plain sbatch array.

    python -m tests.slurm.lab -- python -m benchmarks.corpus workflow
    python -m benchmarks.corpus workflow --shards 200                    # on a login node

Every shard sleeps for a second. "Overhead in jobs" is the run time of all Slurm jobs, as Slurm reports it in whole
seconds, minus the sleeping, per shard; time in the queue does not count. "Wall" is the time of the whole command, queue
included.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.machine import table
from common.cli import positive_int

_WORK = 1.0  # seconds per shard
_SNAKEFILE = """
from common import snakefile
settings = snakefile.read_settings(workflow)
onstart:
    snakefile.prepare_run(settings)
rule all:
    default_target: True
    input: expand("results/x/{s}", s=range(settings.shards))
rule shard:
    output: "results/x/{s}"
    shell: "sleep WORK; touch {output:q}"
"""
_PLUGIN = "snakemake_executor_plugin_slurm"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--shards", type=positive_int, default=40, metavar="N", help="shards (default 40)")
    parser.add_argument("--tasks", type=positive_int, default=8, metavar="N", help="tasks of an array (default 8)")


def _write(folder: Path, shards: int, tasks: int) -> None:
    (folder / "Snakefile").write_text(_SNAKEFILE.replace("WORK", str(_WORK)))
    (folder / "urls.txt").write_text("http://site.example/\n")
    corpus = {"max_tasks": tasks}
    config = {"run": "results/x", "urls": ["urls.txt"], "shards": shards, "cluster": {"corpus": corpus}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def _snakemake(*options: str) -> list[str]:
    asked = ["--default-resources", "mem_mb=100", "runtime=10", "--latency-wait", "10"]
    return [sys.executable, "-m", "snakemake", "--quiet", "all", *options, *asked]


def _array(shards: int, tasks: int) -> list[str]:
    """A plain array, in which each task loops over its shards."""
    loop = f"for i in $(seq {-(-shards // tasks)}); do sleep {_WORK}; done"
    return ["sbatch", "--wait", "--mem=100", "--time=10", "--output=/dev/null", f"--array=1-{tasks}", f"--wrap={loop}"]


def _jobs() -> dict[str, float]:
    """The run time of each Slurm job of this user, in seconds, by id."""
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%S|%e"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split("|") for line in lines if "N/A" not in line]
    return {
        job: (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds() for job, start, end in rows
    }


def measure(arguments: argparse.Namespace) -> str:
    """One row per way to run the shards."""
    shards, tasks = arguments.shards, min(arguments.tasks, arguments.shards)
    ours = ["--executor", "slurm-batch", "--scheduler", "in-order", "--jobs", "unlimited"]
    stock = ["--executor", "slurm", "--jobs", "unlimited", "--slurm-status-command", "squeue"]
    commands = {
        "plain array, one shard per task": _array(shards, shards),
        f"plain array of {tasks} tasks": _array(shards, tasks),
        f"slurm-batch, array of {tasks} tasks": _snakemake(*ours),
    }
    if importlib.util.find_spec(_PLUGIN):
        commands["Snakemake's plugin, one job per shard"] = _snakemake(*stock)
    rows = []
    for name, command in commands.items():
        with TemporaryDirectory() as folder:
            _write(Path(folder), shards, tasks)
            before, started = _jobs(), time.perf_counter()
            subprocess.run(command, cwd=folder, check=True, env=os.environ, stdout=subprocess.DEVNULL)
            wall = time.perf_counter() - started
            time.sleep(2)  # the controller notes the last end
            ran = {job: seconds for job, seconds in _jobs().items() if job not in before}
        rows.append(
            {
                f"{shards} shards of {_WORK:.0f} s": name,
                "Slurm jobs": len(ran),
                "overhead in jobs, s per shard": f"{sum(ran.values()) / shards - _WORK:.2f}",
                "wall, s": f"{wall:.0f}",
            }
        )
    return table(rows)
