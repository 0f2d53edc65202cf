"""One optimiser step in whatever layout, and the loss on data held out."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from common.workers import batched, threaded_map
from training.dataset.batches import Batch, Readable, masked, micro_batches, read_batch
from training.optimizer import set_learning_rate
from training.parallel.data_parallel import before_backward, reshard
from training.parallel.gradients import clip, global_norm, sync_gradients, unscale
from training.session import Session

PARTS = ("forward-backward", "forward", "backward", "gradients", "optimizer")
"""What is timed of a step. Pipeline schedules mix forward and backward passes: there they are not told apart."""


class Step(NamedTuple):
    """What came of an optimiser step; equal on all ranks."""

    loss: float
    """Mean loss in nats over the global batch."""
    grad_norm: float
    """Of the gradient before clipping."""
    taken: bool
    """Whether the optimiser took it."""
    stop: int
    """The largest `stop` that a rank came with."""


def step_batches(session: Session, consumed: int) -> Generator[list[Batch], None, None]:
    """This process' micro-batches from sample `consumed` on, those of one optimiser step at a time, without end.

    Threads read two steps ahead. Close the iterator to stop them.
    """
    experiment = session.plan.experiment
    read = partial(
        read_batch, session.plan.train, replace(session.plan.form, pinned=session.world.device.type == "cuda")
    )
    with closing(
        threaded_map(read, _numbers(session, consumed), experiment.train.readers, 2 * experiment.accumulation)
    ) as batches:
        yield from batched(batches, experiment.accumulation)


def _numbers(session: Session, consumed: int) -> Iterator[range]:
    experiment = session.plan.experiment
    return micro_batches(consumed, experiment.train.micro_batch_size, session.data_rank, experiment.parallel.data)


def train_step(
    session: Session,
    iteration: int,
    batches: Sequence[Batch],
    rate: float,
    scale: float = 1.0,
    accepts: Callable[[float, float], bool] | None = None,
    stop: int = 0,
) -> Step:
    """One optimiser step over this process' part of a global batch (a collective call).

    `iteration` counts from 1. Every target of the global batch that counts weighs the same, in whatever micro-batch
    and on whatever rank it is. The loss is multiplied by `scale` for the backward pass alone. `accepts` says of a loss
    and a gradient norm whether the optimiser takes the step (else it always does); it must decide alike on all ranks.
    The gradients of a step that is not taken stay until the next one.
    """
    experiment, mesh = session.plan.experiment, session.mesh
    session.optimizer.zero_grad()  # of a step that was not taken
    session.streams.start_iteration(iteration)
    counted = _over_data(session, torch.tensor(sum(batch.counted for batch in batches), device=session.world.device))
    # gradients are averaged over data-parallel ranks, so that each must see `data` times its share
    with session.timers("forward-backward"):
        loss = run_micro_batches(session, batches, scale * experiment.parallel.data / counted, train=True)
    with session.timers("gradients"):
        sync_gradients(session.parameters, mesh)
        unscale(session.parameters, scale)
        norm = global_norm(session.parameters, mesh, session.world.device)
        step = _agree(session, _over_all(session, loss) / (experiment.parallel.data * scale), norm, stop)
    if accepts is None or accepts(step.loss, step.grad_norm):
        with session.timers("optimizer"):
            clip(session.parameters, experiment.train.clip_grad, norm)
            set_learning_rate(session.optimizer, rate)
            session.optimizer.step()
            session.optimizer.zero_grad()
        return step
    return step._replace(taken=False)


def _agree(session: Session, loss: Tensor, norm: Tensor, stop: int) -> Step:
    """The same numbers on every rank, and on the host: what follows from them must be the same everywhere."""
    numbers = torch.stack([loss.double(), norm.double(), torch.full_like(loss, stop, dtype=torch.float64)])
    if session.mesh is not None:
        numbers = numbers.nan_to_num(torch.inf, torch.inf, -torch.inf)  # the larger of NaN and 1 is either
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    loss_now, norm_now, wanted = numbers.tolist()  # waits for the device
    return Step(loss_now, norm_now, True, round(wanted))


def run_micro_batches(session: Session, batches: Sequence[Batch], factor: Tensor | float, train: bool) -> Tensor:
    """The micro-batches of one step forward and, to train, backward; their summed losses times `factor`, shape ().

    Zero on every process but those of the pipeline's last stage.
    """
    device = session.world.device
    timed: Callable[[str], AbstractContextManager[object]] = session.timers if train else nullcontext
    batches = [batch.to(device) for batch in batches]
    with loss_parallel(), torch.set_grad_enabled(train):
        if session.pipeline is not None:
            return session.pipeline.run(batches, factor, train)
        (stage,) = session.stages
        total = torch.zeros((), device=device)
        for number, batch in enumerate(batches):
            if train:
                before_backward(stage, number == len(batches) - 1, session.plan.experiment.parallel.zero_stage)
            with timed("forward"):
                loss = stage(batch.tokens, batch.positions, batch.targets).sum() * factor
            if train:
                with timed("backward"):
                    loss.backward()
            total += loss.detach()
    return total


def _over_data(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks (a collective call)."""
    if session.mesh is not None and session.plan.experiment.parallel.data > 1:
        dist.all_reduce(value, group=session.mesh.get_group("dp"))
    return value


def _over_all(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks and pipeline stages (a collective call)."""
    if session.mesh is not None and session.plan.experiment.parallel.pipeline > 1:
        dist.all_reduce(value, group=session.mesh.get_group("pp"))
    return _over_data(session, value)


def validate(session: Session, part: Readable, count: int) -> float:
    """Mean loss in nats a token over the first `count` samples of a part (a collective call, equal on all ranks).

    Whole global batches pass through the layout; what goes past `count` weighs nothing.
    """
    experiment, form = session.plan.experiment, session.plan.form

    def read(numbers: range) -> Batch:
        return masked(read_batch(part, form, numbers), max(0, count - numbers.start))

    steps = -(-count // experiment.train.global_batch_size)
    numbers = islice(_numbers(session, 0), steps * experiment.accumulation)
    total = torch.zeros(2, dtype=torch.float64, device=session.world.device)  # sum of losses, targets
    for stage in session.stages:
        stage.eval()
    with closing(threaded_map(read, numbers, 1, 2 * experiment.accumulation)) as batches:
        for step in batched(batches, experiment.accumulation):
            total[0] += _over_all(session, run_micro_batches(session, step, 1.0, train=False))
            counted = torch.tensor(sum(batch.counted for batch in step), device=total.device)
            total[1] += _over_data(session, counted)
    for stage in session.stages:
        stage.train()
        reshard(stage)
    return float(total[0] / total[1])
