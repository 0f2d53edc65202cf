"""One process of a job under test: trains a few steps of each configuration and writes `seen.<rank>.json` beside it."""

import json
from pathlib import Path
from typing import Any

from tests.training.helpers import open_session, settings_of, step_batches
from training.launch.process_group import World, started
from training.launch.rank import read_launch
from training.optimizer import learning_rate
from training.planning.run import make_plan
from training.step import train_step, validate


def steps(config: Path, world: World) -> dict[str, Any]:
    """Train to the last iteration: losses, gradient norms, validation loss."""
    plan = make_plan(settings_of(config), "tiny")
    session = open_session(plan, world)
    seen: dict[str, Any] = {"loss": [], "norm": []}
    train = plan.experiment.train
    batches = step_batches(session, 0)
    for iteration in range(1, train.iterations + 1):
        rate = learning_rate(iteration - 1, train)
        step = train_step(session, iteration, next(batches), rate)
        seen["loss"].append(step.loss)
        seen["norm"].append(step.grad_norm)
    # 7 samples: no multiple of a batch of 2 over any number of ranks
    seen["valid"] = validate(session, plan.data.valid, 7)
    return seen


def main(configs: list[str]) -> int:
    launch = read_launch()
    with started(launch, Path(configs[0]).parent) as world:
        for config in map(Path, configs):
            config.with_name(f"seen.{launch.rank}.json").write_text(json.dumps(steps(config, world)))
    return 0
