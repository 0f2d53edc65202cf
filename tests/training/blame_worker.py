"""One process of a job under test: looks at each step's losses, and writes what it saw to <output>.<rank>.json."""

import json
from pathlib import Path

import torch

from tests.training.helpers import Session, open_session, settings_of, step_batches
from training.launch.process_group import started
from training.launch.rank import read_launch
from training.monitoring.outputs import target_losses
from training.parallel.dtensor import local_shard
from training.planning.run import make_plan
from training.step import train_step


def _train(session: Session, losses: dict[int, float] | None) -> list[torch.Tensor]:
    """The weights after three steps; the mean losses of this process's samples go to `losses`."""
    size, batches = session.plan.experiment.train.global_batch_size, step_batches(session, 0)
    for step, batch in zip(range(3), batches, strict=False):

        def accepts(_loss: float, _norm: float, step: int = step, batch: list = batch) -> bool:  # type: ignore[type-arg]
            for number, nats, counted in target_losses(session, batch, step * size) if losses is not None else ():
                losses[number] = float(nats.sum() / counted.sum())
            return True

        train_step(session, step + 1, batch, 0.01, accepts=accepts)
    return [local_shard(value).detach().clone() for value in session.parameters.values()]


def main(argv: list[str]) -> int:
    config, output = map(Path, argv)
    launch = read_launch()
    losses: dict[int, float] = {}
    with started(launch, output.parent) as world:
        plan = make_plan(settings_of(config), "tiny")
        equal = map(torch.equal, _train(open_session(plan, world), losses), _train(open_session(plan, world), None))
        result = {"losses": losses, "equal": all(equal)}
    output.with_suffix(f".{launch.rank}.json").write_text(json.dumps(result))
    return 0
