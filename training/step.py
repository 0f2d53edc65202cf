"""One optimiser step, and validation, in any parallel layout.

with closing(step_batches(session, data.train, consumed_samples)) as batches:
    step = train_step(session, iteration, next(batches), rate)
loss = validate(session, data.valid, samples)
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.settings.training import DOCUMENT_RULES
from common.workers import batched, threaded_map
from training.dataset.batches import (
    Batch,
    BatchForm,
    TokenSource,
    masked,
    micro_batches,
    prefetch_to_device,
    read_batch,
)
from training.dataset.blend import Blend
from training.parallel.data_parallel import before_backward, reshard
from training.parallel.gradients import clip_factor, global_norm, sync_gradients
from training.parallel.layout import coordinates
from training.parallel.pipeline import sample_factors
from training.session import Session


class StepResult(NamedTuple):
    """The outcome of an optimiser step; equal on all ranks."""

    loss: float
    """Mean loss in nats over the targets of the global batch; NaN if it has none."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    taken: bool
    """Whether the optimiser took the step."""
    stop: int
    """The most urgent stop request of any rank: CONTINUE, SAVE or LEAVE of `training.monitoring.stop`."""
    targets: int
    """Of the global batch; 0 if all of its documents have been removed."""


def mean_loss(total: float, targets: float) -> float | None:
    """Nats per target; None over no targets: a removed document has none, and a mean over nothing is no number."""
    return total / targets if targets else None


def step_batches(session: Session, data: TokenSource, consumed: int) -> Generator[list[Batch], None, None]:
    """This process's micro-batches from sample `consumed` on, one list per optimiser step, without end.

    Threads read two steps ahead, and on a GPU the next step is copied there. Close the iterator to stop them.
    """
    accumulation, device = session.experiment.accumulation, session.world.device
    read = partial(read_batch, data, _batch_form(session, data, pinned=device.type == "cuda"))
    samples = sample_ranges(session, consumed)
    with closing(threaded_map(read, samples, session.experiment.train.readers, 2 * accumulation)) as batches:
        steps = batched(batches, accumulation)
        yield from prefetch_to_device(steps, device) if device.type == "cuda" else steps


def _batch_form(session: Session, data: TokenSource, pinned: bool = False) -> BatchForm:
    train = session.experiment.train
    return BatchForm(data.end_of_text, **{rule: getattr(train, rule) for rule in DOCUMENT_RULES}, pinned=pinned)


def sample_ranges(session: Session, consumed: int) -> Iterator[range]:
    """The samples of each of this process's micro-batches, from sample `consumed` on."""
    _, data_rank, _ = coordinates(session.mesh)
    experiment = session.experiment
    return micro_batches(consumed, experiment.train.micro_batch_size, data_rank, experiment.parallel.data)


def train_step(
    session: Session,
    iteration: int,
    batches: Sequence[Batch],
    rate: float,
    scale: float = 1.0,
    accepts: Callable[[float, float], bool] | None = None,
    stop: int = 0,
) -> StepResult:
    """One optimiser step on this process's part of a global batch (a collective call).

    `iteration` counts from 1. Every unmasked target of the global batch has the same weight, whatever its micro-batch
    and rank. The loss is multiplied by `scale` for the backward pass only. `accepts` decides from the loss and
    the gradient norm whether the optimiser takes the step (default: always); all ranks must decide alike. Without
    targets no step is taken. The gradients of a step that is not taken stay until the next one.
    """
    parallel, mesh = session.experiment.parallel, session.mesh
    session.optimizer.zero_grad()  # a step that was not taken leaves its gradients
    session.streams.start_iteration(iteration)
    counted = sum(batch.counted for batch in batches)
    targets = _sum_over_data_ranks(session, torch.full((), counted, device=session.world.device))  # no copy, no wait
    with session.timers("forward-backward"):
        # gradients are averaged over data-parallel ranks, so each rank's loss is multiplied by their number
        loss = run_micro_batches(session, batches, scale * parallel.data / targets.clamp(min=1), train=True)
    with session.timers("gradients"):
        sync_gradients(session.parameters, mesh, parallel.sequence_parallel)
        norm = global_norm(session.parameters, mesh, session.world.device) / scale
        step = _agree(session, _sum_over_all_ranks(session, loss) / (parallel.data * scale), norm, stop, targets)
    if not step.targets or (accepts is not None and not accepts(step.loss, step.grad_norm)):
        return step._replace(taken=False)
    with session.timers("optimizer"):
        factor = clip_factor(session.experiment.train.clip_grad, norm) / scale
        session.optimizer.step(rate, factor.float())
        session.optimizer.zero_grad()
    return step


def run_micro_batches(session: Session, batches: Sequence[Batch], factor: Tensor | float, train: bool) -> Tensor:
    """Run one step's micro-batches forward and, if `train`, backward; the sum of their losses times `factor`, shape ().

    Without `train` there is no dropout. Zero except on the processes of the last pipeline stage.
    """
    device = session.world.device
    timed: Callable[[str], AbstractContextManager[object]] = session.timers if train else nullcontext
    batches = [batch.to(device) for batch in batches]
    for stage in session.stages:
        if stage.training != train:
            stage.train(train)
        stage.round_weights()
    with torch.set_grad_enabled(train):
        if session.pipeline is not None:
            kept = {} if train else {parameter: parameter.grad for parameter in session.parameters.values()}
            summed = session.pipeline.run(batches, factor, train)
            for parameter, gradient in kept.items():
                parameter.grad = gradient  # PyTorch drops FSDP's when a schedule turns to evaluation
            return summed
        (stage,) = session.stages
        total = torch.zeros((), device=device)
        factors = sample_factors(factor, len(batches[0].tokens), device)
        for index, batch in enumerate(batches):
            if train:
                before_backward(stage, index == len(batches) - 1, session.experiment.parallel.zero_stage)
            with timed("forward"):
                loss = stage(batch.tokens, batch.positions, batch.targets, factors, batch.ends).sum()
            if train:
                with timed("backward"):
                    loss.backward()
            total += loss.detach()
    return total


def _agree(session: Session, loss: Tensor, norm: Tensor, stop: int, targets: Tensor) -> StepResult:
    """The largest loss, norm and stop request of all ranks: every rank decides on the same numbers."""
    asked = torch.full_like(loss, stop, dtype=torch.float64)
    numbers = torch.stack([loss.double(), norm.double(), asked, targets.double()])
    if session.mesh is not None:
        numbers = numbers.nan_to_num(torch.inf, torch.inf, -torch.inf)  # MAX of NaN and a number may be either
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    largest_loss, largest_norm, largest_stop, counted = numbers.tolist()  # waits for the device
    return StepResult(largest_loss if counted else math.nan, largest_norm, True, round(largest_stop), round(counted))


def _sum_over_data_ranks(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks, in place (a collective call)."""
    if session.mesh is not None and session.experiment.parallel.data > 1:
        dist.all_reduce(value, group=session.mesh.get_group("dp"))
    return value


def _sum_over_all_ranks(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks and pipeline stages, in place (a collective call)."""
    if session.mesh is not None and session.experiment.parallel.pipeline > 1:
        dist.all_reduce(value, group=session.mesh.get_group("pp"))
    return _sum_over_data_ranks(session, value)


def validate(session: Session, data: Blend, samples: int) -> float | None:
    """Mean loss in nats per token over the first `samples` samples (a collective call, equal on all ranks).

    None if they have no targets. Whole global batches pass through the layout; samples past `samples` are masked.
    """
    accumulation = session.experiment.accumulation
    form = _batch_form(session, data)

    def read(numbers: range) -> Batch:
        return masked(read_batch(data, form, numbers), max(0, samples - numbers.start))

    steps = -(-samples // session.experiment.train.global_batch_size)
    ranges = islice(sample_ranges(session, 0), steps * accumulation)
    total = torch.zeros(2, dtype=torch.float64, device=session.world.device)  # sum of losses, targets
    with closing(threaded_map(read, ranges, 1, 2 * accumulation)) as batches:
        for step in batched(batches, accumulation):
            total[0] += _sum_over_all_ranks(session, run_micro_batches(session, step, 1.0, train=False))
            targets = torch.tensor(sum(batch.counted for batch in step), device=total.device)
            total[1] += _sum_over_data_ranks(session, targets)
    for stage in session.stages:
        reshard(stage)
    return mean_loss(*total.tolist())
