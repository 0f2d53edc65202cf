"""Check the nodes of a training job without training: devices, memory, disk, network.

    srun -N 2 --ntasks-per-node 8 --gres gpu:8 python -m cluster.preflight --config x.yaml --model m
    python -m cluster.preflight --config config.yaml --model tiny parallel.tensor=1

As many processes as the model's layout has, alone or under srun or torchrun, print one row per
node. A node that cannot run the job is named, with exit code 2. Every training makes the same
checks before its first step.
"""

import sys
from collections.abc import Sequence

from common import cli
from training.launch.preflight import run_preflight
from training.launch.signals import leave_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.preflight", __doc__)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    return run_preflight(cli.read_settings(arguments), arguments.model)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main))
