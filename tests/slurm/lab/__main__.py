"""Run a command in a throw-away Slurm on this machine; returns the command's exit code.

    python -m tests.slurm.lab -- sinfo
    python -m tests.slurm.lab --nodes 4 --gpus 2 -- srun --nodes 4 --gres gpu:1 hostname

Nothing outside its folder is touched. Partition `main` is the default; jobs in `low` are preempted
if `main` needs their nodes. The GPUs are fake: Slurm counts them and sets CUDA_VISIBLE_DEVICES.
However this process ends, the lab and what runs in it end, too.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.slurm.lab.cluster import missing, slurm


def main() -> int:
    """Command line; returns the exit code of the command that ran in the lab."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.lab", description=__doc__, formatter_class=raw)
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of 8 CPUs (default 2)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="fake GPUs per node (default 0)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what to run in the lab")
    options = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # removes the folder
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the command's
    with TemporaryDirectory(prefix="slurm-lab-") as folder, slurm(Path(folder), options.nodes, options.gpus) as lab:
        code = subprocess.call([*lab.inside(), *options.command], env=lab.environment)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
