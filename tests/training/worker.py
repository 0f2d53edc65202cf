"""One process of a job under test: trains a few steps and writes what it saw to <output>.<rank>.json."""

import argparse
import json
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from tests.training.helpers import settings_of
from training import checkpoint
from training.checkpoint import Progress
from training.distributed import World, read_launch, started
from training.loop import open_session, step_batches, train_step
from training.optimizer import learning_rate
from training.parallel import plain
from training.plan import make_plan
from training.validation import mean_loss


def steps(config: Path, world: World, save_at: int = 0) -> dict[str, Any]:
    """Train from the newest checkpoint to the last iteration: losses, gradient norms, local shapes."""
    settings = settings_of(config)
    plan = make_plan(settings, "tiny")
    session = open_session(plan, world)
    progress = Progress(0, 0)
    folder = settings.run_folder("tiny")
    if newest := checkpoint.newest(folder):
        checkpoint.load(newest, session.model, session.optimizer)
        progress = newest.progress
    seen: dict[str, Any] = {"loss": [], "norm": []}
    train = plan.run.train
    batches = step_batches(session, progress.consumed_samples)
    for iteration in range(progress.iteration + 1, train.iterations + 1):
        rate = learning_rate(iteration - 1, train)
        loss, norm = train_step(session, iteration, next(batches), rate)
        seen["loss"].append(float(loss))
        seen["norm"].append(float(plain(norm)))
        progress = Progress(iteration, progress.consumed_samples + train.global_batch_size)
        if iteration == save_at:
            checkpoint.save(folder, session.model, session.optimizer, progress, plan)
    # 7 samples: no multiple of a batch of 2 over any number of ranks
    micro = train.micro_batch_size
    seen["valid"] = mean_loss(session.model, plan.valid, 7, micro, train.precision, plan.form, session.mesh)
    seen["shapes"] = {
        name: list((parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape)
        for name, parameter in session.model.named_parameters()
    }
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
