"""One optimiser step, and validation, in any parallel layout.

with closing(step_batches(session, data.train, consumed_samples)) as batches:
    step = train_step(session, iteration, next(batches), rate)
loss = validate(session, data.valid, samples)
"""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
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
from training.parallel.gradients import global_norm, sync_gradients
from training.parallel.layout import coordinates
from training.parallel.pipeline import sample_factors
from training.session import Session


class StepResult(NamedTuple):
    """The outcome of an optimiser step; equal on all ranks."""

    loss: float  # mean in nats over the targets of the global batch; NaN if it has none
    grad_norm: float  # of the gradient before clipping
    taken: bool  # whether the optimiser took the step
    stop: int  # the most urgent request of any rank: CONTINUE, SAVE or LEAVE of training.monitoring.stop
    targets: int  # of the global batch; 0 if all of its documents have been removed
    scale: float  # by which the loss was multiplied for the backward pass


def step_batches(session: Session, data: TokenSource, consumed: int) -> Generator[list[Batch], None, None]:
    """This process's micro-batches from sample `consumed` on: endlessly, one list per step.

    Threads read two steps ahead; on a GPU the next step is copied there. Close it to stop them.
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
    session: Session, iteration: int, batches: Sequence[Batch], rate: float, scale: float = 1.0
) -> StepResult:
    """One optimiser step on this process's part of a global batch (a collective call).

    The trainer judges a step before it takes it; this takes every step that has targets.
    """
    step = compute_gradients(session, iteration, batches, scale)
    if not step.targets:
        return step
    update_weights(session, step, rate)
    return step._replace(taken=True)


def compute_gradients(
    session: Session, iteration: int, batches: Sequence[Batch], scale: float = 1.0, stop: int = 0
) -> StepResult:
    """Run forward and backward passes over one global batch; the weights stay (a collective call).

    `iteration` counts from 1. Every unmasked target of the global batch has the same weight. The
    loss is multiplied by `scale` for the backward pass. `stop` is this rank's stop request.
    """
    parallel, mesh = session.experiment.parallel, session.mesh
    session.optimizer.zero_grad()  # a step that was not taken leaves its gradients
    session.streams.start_iteration(iteration)
    counted = sum(batch.counted for batch in batches)
    targets = _sum_over_data_ranks(session, torch.full((), counted, device=session.world.device))  # no copy, no wait
    with session.timers("forward-backward"):
        # gradients are averaged over data ranks, so each rank's loss is multiplied by their number
        factor = scale * parallel.data / targets.clamp(min=1)
        loss = run_micro_batches(session, batches, factor, train=True)
    with session.timers("gradients"):
        sync_gradients(session.parameters, mesh, parallel.sequence_parallel)
        norm = global_norm(session.parameters, mesh, session.world.device) / scale
        loss = _total_loss(session, loss) / (parallel.data * scale)
        asked = torch.full_like(norm, stop)
        numbers = torch.stack([loss.double(), norm, asked, targets.double()])
        if mesh is not None:  # every rank decides on the same numbers
            numbers = numbers.nan_to_num(torch.inf, torch.inf, -torch.inf)  # MAX of NaN and a number may be either
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        mean_loss, grad_norm, request, total = numbers.tolist()  # waits for the device
    return StepResult(mean_loss if total else math.nan, grad_norm, False, round(request), round(total), scale)


def update_weights(session: Session, step: StepResult, rate: float) -> None:
    """Let the optimiser take the step: clip the gradients, undo the loss scale, update weights."""
    with session.timers("optimizer"):
        clip = min(1.0, session.experiment.train.clip_grad / (step.grad_norm + 1e-6))  # as torch's clip_grad_norm_
        session.optimizer.step(rate, torch.full((), clip / step.scale, device=session.world.device))
        session.optimizer.zero_grad()


def run_micro_batches(session: Session, batches: Sequence[Batch], factor: Tensor | float, train: bool) -> Tensor:
    """Run micro-batches forward and, if `train`, backward; the sum of their losses times `factor`.

    Without `train` there is no dropout. Zero except on the processes of the last pipeline stage.
    """
    device = session.world.device
    timed = session.timers if train else nullcontext
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


def _sum_over_data_ranks(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks, in place (a collective call)."""
    if session.mesh is not None and session.experiment.parallel.data > 1:
        dist.all_reduce(value, group=session.mesh.get_group("dp"))
    return value


def _total_loss(session: Session, value: Tensor) -> Tensor:
    """Sum a loss over pipeline stages and data-parallel ranks, in place (a collective call)."""
    if session.mesh is not None and session.experiment.parallel.pipeline > 1:
        dist.all_reduce(value, group=session.mesh.get_group("pp"))
    return _sum_over_data_ranks(session, value)


def validate(session: Session, data: Blend, samples: int) -> float | None:
    """Mean loss in nats per token over the first `samples` samples; None if they have no targets.

    A collective call, equal on all ranks. The last global batch is masked after `samples`.
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
            total[0] += _total_loss(session, run_micro_batches(session, step, 1.0, train=False))
            targets = torch.tensor(sum(batch.counted for batch in step), device=total.device)
            total[1] += _sum_over_data_ranks(session, targets)
    for stage in session.stages:
        reshard(stage)
    loss, counted = total.tolist()
    return loss / counted if counted else None
