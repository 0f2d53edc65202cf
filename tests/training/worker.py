"""One process of a job under test: trains a few steps and writes its results to <output>.<rank>.json."""

import argparse
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    launch = read_launch()
    with started(launch, arguments.output.parent) as world:
        result = steps(arguments.config, world)
    arguments.output.with_suffix(f".{launch.rank}.json").write_text(json.dumps(result))
    return 0
