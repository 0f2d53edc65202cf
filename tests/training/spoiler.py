"""One process of a job in which numbers become non-finite; prints what it finds.

`forward`: a layer on each of two pipeline stages overflows; where does it begin?
`gradient`: one number in one gradient of the last rank does; is the step taken?
"""

from pathlib import Path

import torch

from tests.training.helpers import Session, open_session, settings_of, step_batches
from training import step, trainer
from training.monitoring.guard import Guard
from training.parallel.dtensor import local_shard
from training.parallel.launch import read_launch
from training.parallel.process_group import started
from training.run_plan import make_plan


def diagnosis_of_a_step(session: Session) -> str:
    """Where the first non-finite number of a step is; the step is not taken."""
    steps = step_batches(session, 0)
    batches = next(steps)
    steps.close()
    step.train_step(session, 1, batches, 0.01, accepts=lambda loss, norm: False)
    return trainer._find_non_finite(session, batches)


def overflow_forward(session: Session) -> str:
    with torch.no_grad():
        for name in {"h.1.mlp.c_fc.weight", "h.3.mlp.c_fc.weight"} & session.parameters.keys():
            session.parameters[name].fill_(1e38)
    return diagnosis_of_a_step(session)


def overflow_gradient(session: Session) -> str:
    real, guard = step.sync_gradients, Guard(session.experiment.train, session.experiment.watch)

    def sync_gradients(parameters, mesh):  # type: ignore[no-untyped-def]
        real(parameters, mesh)
        if session.world.rank == session.world.size - 1:
            local_shard([*parameters.values()][-1].grad).view(-1)[0] = torch.inf

    step.sync_gradients = sync_gradients  # type: ignore[assignment]
    steps = step_batches(session, 0)
    before = {name: local_shard(value).detach().clone() for name, value in session.parameters.items()}
    taken = step.train_step(session, 1, next(steps), 0.01, guard.scale, guard.accepts).taken
    steps.close()
    same = all(torch.equal(local_shard(value), before[name]) for name, value in session.parameters.items())
    return f"taken {taken}, untouched {same}"


def main(argv: list[str]) -> int:
    config = Path(argv[0])
    with started(read_launch(), config.parent) as world:
        session = open_session(make_plan(settings_of(config), "tiny"), world)
        print({"forward": overflow_forward, "gradient": overflow_gradient}[argv[1]](session))
    return 0
