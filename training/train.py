"""Train one model of the configuration, alone or as one process of many (submitit, srun, torchrun).

    python -m training.train --config config.yaml --model tiny parallel.tensor=1
    torchrun --nproc-per-node 2 -m training.train --config config.yaml --model tiny

Results are in the model folder, RUN/models/NAME: iter_* checkpoints, train.csv, valid.csv,
settings.yaml, and done.json at the end. The same command resumes a stopped run from its newest
complete checkpoint. Ctrl-C, SIGTERM, SIGHUP, SIGUSR2 or a file named `stop` in the model folder end
it after the current step, with a checkpoint and exit code 75 (torchrun turns it into 1). A second
Ctrl-C ends it at once. Exit code 76: a newer job has the model folder.
"""

import sys
from collections.abc import Sequence

from common import cli
from common.config import settings_text
from common.errors import RESUME_ME
from common.settings import Settings
from training.launch.process_group import joined
from training.launch.rank import check_layout, read_launch, starting
from training.launch.signals import ignore_signals, leave_at_once
from training.metrics.boards import check_boards
from training.model_folder import is_finished, stopped_mark
from training.planning.elastic import on_processes
from training.planning.run import Plan, fit_plan, make_plan


def train(settings: Settings, name: str) -> int:
    """Train the model `name` as one process of its job; returns the exit code.

    RESUME_ME: it was asked to stop early. Raises ToolkitError, whose exit code distinguishes user
    errors from dead ranks and a lost lock.
    """
    launch, folder = read_launch(), settings.model_folder(name)
    if name in settings.models and settings.cluster.min_nodes:
        settings = on_processes(settings, name, launch.world_size)

    def check() -> Plan:
        is_finished(settings, name)
        starting(launch.rank, "opens the data")
        plan = make_plan(settings, name)
        check_layout(launch, plan.experiment.parallel, name)
        check_boards(plan.experiment.log, name)
        if launch.rank == 0:
            stopped_mark(folder).unlink(missing_ok=True)
        return plan

    with joined(launch, folder, settings.cluster, check) as (world, plan):
        starting(launch.rank, "imports the trainer")
        from training.job import run_training  # imports torch for seconds: after every check that needs none

        starting(launch.rank, "plans memory and time")
        plan, chosen = fit_plan(plan, settings, world)
        finished = run_training(plan, folder, world, settings_text(chosen))
        ignore_signals()
    return 0 if finished else RESUME_ME


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.train", __doc__)
    cli.add_model_settings(parser)
    arguments = parser.parse_args(argv)
    return train(cli.read_settings(arguments), arguments.model)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main, signals=False))  # training.monitoring.stop handles them
