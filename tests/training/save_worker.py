"""One process of a job that trains and saves with `CheckpointWriter`; arguments name faults of its last rank.

`nudge`: one number of a LayerNorm differs there by 0.5 before the save at step 1.
`full`: no file may grow there after step 1, as on a full disk.
"""

import resource
from pathlib import Path

import torch

from tests.training.helpers import checkpoint_writer, open_session, settings_of, step_batches
from training.checkpoint import Progress
from training.launch.process_group import started
from training.launch.rank import read_launch
from training.parallel.dtensor import local_shard
from training.planning.run import make_plan
from training.step import train_step


def main(argv: list[str]) -> int:
    config, faults = Path(argv[0]), argv[1:]
    settings = settings_of(config)
    with started(read_launch(), config.parent) as world:
        plan = make_plan(settings, "tiny")
        session = open_session(plan, world)
        last_rank = world.rank == world.size - 1
        folder = settings.model_folder("tiny")
        folder.mkdir(parents=True, exist_ok=True)
        calls: list[int] = []
        steps = step_batches(session, 0)
        with checkpoint_writer(session, folder, lambda: calls.append(1)) as saver:
            for iteration in range(1, plan.experiment.train.iterations + 1):
                train_step(session, iteration, next(steps), 0.01)
                if "nudge" in faults and last_rank and iteration == 1:
                    with torch.no_grad():
                        local_shard(session.parameters["h.1.ln_2.bias"])[3] += 0.5
                if "full" in faults and last_rank and iteration == 2:
                    saver.wait()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
                saver.save(Progress(iteration, 8 * iteration, {"iteration": iteration}))
        steps.close()
        if world.rank == 0:
            print(f"asked {len(calls)} times")
    return 0
