"""What one process holds while it trains, built in the layout of the plan."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from training.metrics.timers import Timers
from training.optimizer import make_optimizer
from training.parallel.layout import build_model, make_mesh, named_parameters
from training.parallel.pipeline import Pipeline, Stage
from training.parallel.process_group import World
from training.parallel.randomness import RandomStreams
from training.plan import Plan


@dataclass
class Session:
    """Everything one process holds while it trains."""

    plan: Plan
    world: World
    mesh: DeviceMesh | None
    stages: list[Stage]
    pipeline: Pipeline | None
    parameters: dict[str, nn.Parameter]
    """The parameters of this process, by name, as the optimiser has them."""
    optimizer: torch.optim.AdamW
    streams: RandomStreams
    timers: Timers

    @property
    def data_rank(self) -> int:
        """This process' place on the data-parallel axis."""
        return self.mesh.get_local_rank("dp") if self.mesh else 0


def open_session(plan: Plan, world: World) -> Session:
    """Build the model, its optimiser and its random streams in the plan's layout (a collective call)."""
    experiment, parallel = plan.experiment, plan.experiment.parallel
    mesh = make_mesh(parallel, world.device.type)
    stages = build_model(experiment, mesh, world.device)
    pipeline = Pipeline(stages, experiment, mesh, world.device) if mesh and parallel.pipeline > 1 else None
    ranks = tuple(mesh.get_local_rank(axis) for axis in ("pp", "dp", "tp")) if mesh else (0, 0, 0)
    own = ranks if parallel.sequence_parallel else ranks[:2]
    streams = RandomStreams(experiment.train.seed, own, world.device)
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        for stage in stages:
            streams.attach(stage, ranks[2])
    parameters = named_parameters(stages)
    optimizer = make_optimizer(parameters.values(), experiment.train)
    return Session(plan, world, mesh, stages, pipeline, parameters, optimizer, streams, Timers(world.device))
