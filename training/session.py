"""The training state of one process: its part of the model, the optimiser, the random streams.

session = open_session(experiment, world)
"""

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.settings import Experiment
from training.launch.process_group import World
from training.metrics.device import Timers
from training.optimizer import Optimizer, make_optimizer
from training.parallel.layout import build_model, coordinates, make_mesh, named_parameters
from training.parallel.pipeline import Pipeline, Stage
from training.parallel.randomness import RandomStreams


@dataclass
class Session:
    """One process's part of a training."""

    experiment: Experiment
    world: World
    mesh: DeviceMesh | None  # (pp, dp, tp); None for a single process
    stages: list[Stage]
    pipeline: Pipeline | None
    parameters: dict[str, nn.Parameter]  # this process's, by name
    optimizer: Optimizer
    streams: RandomStreams
    timers: Timers


def open_session(experiment: Experiment, world: World, mesh: DeviceMesh | None = None) -> Session:
    """Build the model, its optimiser and its random streams in their layout (a collective call).

    `mesh` is the layout's mesh, if the caller has it already.
    """
    parallel = experiment.parallel
    mesh = mesh or make_mesh(parallel, world.device.type)
    stages = build_model(experiment, mesh, world.device)
    pipeline = None
    if mesh and parallel.pipeline > 1:
        pipeline = Pipeline(stages, experiment, mesh, world.device)
    pp, dp, tp = coordinates(mesh)
    streams = RandomStreams(experiment.train.seed, (pp, dp, tp) if parallel.sequence_parallel else (pp, dp))
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        for stage in stages:
            streams.attach(stage, tp)
    parameters = named_parameters(stages)
    optimizer = make_optimizer(parameters, experiment, mesh)
    return Session(experiment, world, mesh, stages, pipeline, parameters, optimizer, streams, Timers(world.device))
