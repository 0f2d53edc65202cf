"""One process of a job in which a number of a gradient on the last rank overflows; prints whether the step is taken."""

from pathlib import Path

import torch

from tests.training.helpers import open_session, settings_of, step_batches
from training import step
from training.monitoring.guard import Guard
from training.parallel.dtensor import local_shard
from training.parallel.launch import read_launch
from training.parallel.process_group import started
from training.run_plan import make_plan


def main(argv: list[str]) -> int:
    config, real = Path(argv[0]), step.sync_gradients
    with started(read_launch(), config.parent) as world:
        session = open_session(make_plan(settings_of(config), "tiny"), world)
        guard = Guard(session.experiment.train, session.experiment.watch)

        def sync_gradients(parameters, mesh):  # type: ignore[no-untyped-def]
            real(parameters, mesh)
            if world.rank == world.size - 1:
                local_shard([*parameters.values()][-1].grad).view(-1)[0] = torch.inf

        step.sync_gradients = sync_gradients  # type: ignore[assignment]
        steps = step_batches(session, 0)
        before = {name: local_shard(value).detach().clone() for name, value in session.parameters.items()}
        taken = step.train_step(session, 1, next(steps), 0.01, guard.scale, guard.accepts).taken
        steps.close()
        same = all(torch.equal(local_shard(value), before[name]) for name, value in session.parameters.items())
        print(f"taken {taken}, untouched {same}")
    return 0
