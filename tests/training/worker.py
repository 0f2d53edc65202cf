"""One process of a job under test: trains a few steps and writes its results to <output>.<rank>.json."""

import argparse
import json
from pathlib import Path
from typing import Any

from tests.training.helpers import open_session, save_checkpoint, settings_of, step_batches
from training import checkpoint
from training.checkpoint import Progress
from training.launch.process_group import World, started
from training.launch.rank import read_launch
from training.optimizer import learning_rate
from training.parallel.dtensor import local_shard
from training.planning.run import make_plan
from training.step import next_logits, train_step, validate


def steps(config: Path, world: World, save_at: int = 0) -> dict[str, Any]:
    """Train from the newest checkpoint to the last iteration: losses, gradient norms, local shapes."""
    settings = settings_of(config)
    plan = make_plan(settings, "tiny")
    session = open_session(plan, world)
    progress = Progress(0, 0)
    folder = settings.model_folder("tiny")
    if newest := checkpoint.newest(folder):
        checkpoint.load(newest, session.parameters, session.optimizer)
        progress = newest.progress
    seen: dict[str, Any] = {"loss": [], "norm": []}
    train = plan.experiment.train
    batches = step_batches(session, progress.consumed_samples)
    for iteration in range(progress.iteration + 1, train.iterations + 1):
        rate = learning_rate(iteration - 1, train)
        step = train_step(session, iteration, next(batches), rate)
        seen["loss"].append(step.loss)
        seen["norm"].append(step.grad_norm)
        progress = Progress(iteration, progress.consumed_samples + train.global_batch_size)
        if iteration == save_at:
            save_checkpoint(folder, session.parameters, session.optimizer, progress, plan)
    # 7 samples: no multiple of a batch of 2 over any number of ranks
    seen["valid"] = validate(session, plan.data.valid, 7)
    seen["logits"] = next_logits(session, b"The").tolist()
    seen["shapes"] = {name: list(local_shard(value).shape) for name, value in session.parameters.items()}
    return seen


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--save-at", type=int, default=0)
    arguments = parser.parse_args(argv)
    launch = read_launch()
    with started(launch, arguments.output.parent) as world:
        result = steps(arguments.config, world, arguments.save_at)
    arguments.output.with_suffix(f".{launch.rank}.json").write_text(json.dumps(result))
    return 0
