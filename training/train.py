"""Train one model of the configuration, alone or as one process of many (submitit, srun, torchrun).

    python -m training.train --config config.yaml --model tiny parallel.tensor=1
    torchrun --nproc-per-node 2 -m training.train --config config.yaml --model tiny train.iterations=300

Results are in <run>/models/<name>: iter_* checkpoints, train.csv, valid.csv, settings.yaml, done.json at the end. The
same command continues a run that was stopped, from its newest complete checkpoint. Ctrl-C, SIGTERM, SIGHUP, SIGUSR2
or a file named `stop` in that folder end it after the current step, with a checkpoint and exit code 75 (torchrun
turns it into 1): start it again. A second Ctrl-C ends it at once.
"""

import sys
from collections.abc import Sequence

from common import cli
from common.settings import Settings
from training.metrics.boards import check_boards
from training.monitoring.stop import RESUME_ME
from training.parallel.distributed import before_start, check_offload, check_world_size, read_launch, started
from training.plan import make_plan


def train(settings: Settings, name: str) -> int:
    """Train the model `name`; every process of the job calls this, and finds out itself which one it is.

    Returns the exit code: 0, or RESUME_ME where the run was asked to stop before its end.
    """
    launch = read_launch()
    folder = settings.model_folder(name)
    with before_start(launch, folder):
        plan = make_plan(settings, name)
        check_world_size(launch, plan.experiment.parallel, name)
        check_offload(plan.experiment.parallel, name)
        check_boards(plan.experiment.log, name)
        folder.mkdir(parents=True, exist_ok=True)
    with started(launch, folder) as world:
        from training.loop import run_training  # torch, seconds of import: after all that can be wrong without it

        return 0 if run_training(settings, plan, world) else RESUME_ME


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.train", __doc__)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    with before_start(read_launch()):
        settings = cli.read_settings(arguments)
    return train(settings, arguments.model)


if __name__ == "__main__":
    sys.exit(cli.run(main, signals=False))  # training.monitoring.stop handles them
