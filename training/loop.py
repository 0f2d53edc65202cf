"""The training loop: what one process does between the start of a job and its last checkpoint."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from common.config import write_settings
from common.files import read_rows, write_json
from common.settings import Settings
from common.workers import batched, threaded_map
from training import checkpoint
from training.batches import Batch, masked, micro_batches, read_batch
from training.checkpoint import Manifest, Progress
from training.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, log_line
from training.data_parallel import before_backward, drop_gathered
from training.distributed import World, one_voice
from training.gradients import clip, settle
from training.optimizer import learning_rate, make_optimizer, set_learning_rate
from training.parallel import build_model, make_mesh, named_parameters
from training.pipeline import Pipeline, Stage
from training.plan import Plan
from training.randomness import RandomStreams


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

    @property
    def data_rank(self) -> int:
        """This process' place on the data-parallel axis."""
        return self.mesh.get_local_rank("dp") if self.mesh else 0


def run_training(settings: Settings, plan: Plan, world: World) -> None:
    """Train the plan's model from its newest checkpoint, or from nothing, to its last iteration."""
    folder = settings.run_folder(plan.name)
    train = plan.run.train
    with one_voice(world.rank):
        newest = checkpoint.newest(folder)
        if newest is not None:
            checkpoint.check_fits(newest, plan)
    if newest is not None and newest.progress.iteration >= train.iterations:
        if world.rank == 0:
            print(f"{newest.path}: already at iteration {newest.progress.iteration} of {train.iterations}", flush=True)
            _write_done(folder, newest)
        return

    if world.rank == 0:
        print(plan, flush=True)
        write_settings(settings, folder / "settings.yaml")
        (folder / "done.json").unlink(missing_ok=True)  # more iterations were asked for: it is not done any more
    session = open_session(plan, world)
    progress = Progress(0, 0)
    if newest is not None:
        checkpoint.load(newest, session.parameters, session.optimizer)
        progress = newest.progress
        if world.rank == 0:
            print(f"resumed from {newest.path}", flush=True)
    last = _iterate(session, settings, folder, progress)
    if world.rank == 0:
        _write_done(folder, checkpoint.read_manifest(last))


def open_session(plan: Plan, world: World) -> Session:
    """Build the model, its optimiser and its random streams in the plan's layout (a collective call)."""
    run, parallel = plan.run, plan.run.parallel
    mesh = make_mesh(parallel, world.device.type)
    stages = build_model(run, mesh, world.device)
    pipeline = Pipeline(stages, run, mesh, world.device) if mesh and parallel.pipeline > 1 else None
    ranks = tuple(mesh.get_local_rank(axis) for axis in ("pp", "dp", "tp")) if mesh else (0, 0, 0)
    own = ranks if parallel.sequence_parallel else ranks[:2]
    streams = RandomStreams(run.train.seed, own, world.device)
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        for stage in stages:
            streams.attach(stage, ranks[2])
    parameters = named_parameters(stages)
    optimizer = make_optimizer(parameters.values(), run.train)
    return Session(plan, world, mesh, stages, pipeline, parameters, optimizer, streams)


def _iterate(session: Session, settings: Settings, folder: Path, progress: Progress) -> Path:
    """Iterate, log, validate and save up to the last iteration; returns the last checkpoint's folder."""
    run, train, speaks = session.plan.run, session.plan.run.train, session.world.rank == 0
    train_curve = Curve(folder / "train.csv", TRAIN_COLUMNS, progress.iteration) if speaks else None
    valid_curve = Curve(folder / "valid.csv", VALID_COLUMNS, progress.iteration) if speaks else None
    saved = folder
    losses: list[Tensor] = []
    waited, started = 0.0, time.perf_counter()
    steps = step_batches(session, progress.consumed_samples)
    for iteration in range(progress.iteration + 1, train.iterations + 1):
        asked = time.perf_counter()
        batches = next(steps)
        waited += time.perf_counter() - asked
        rate = learning_rate(iteration - 1, train)
        loss, grad_norm = train_step(session, iteration, batches, rate)
        losses.append(loss)
        progress = Progress(iteration, progress.consumed_samples + train.global_batch_size)
        last = iteration == train.iterations

        if last or iteration % train.log_interval == 0:
            mean = float(torch.stack(losses).mean())  # waits for the device, so the clock is read after it
            seconds = (time.perf_counter() - started) / len(losses)
            norm = float(grad_norm)
            row = {
                "iteration": iteration,
                "consumed_samples": progress.consumed_samples,
                "consumed_tokens": progress.consumed_samples * run.model.seq_len,
                "learning_rate": rate,
                "lm_loss": mean,
                "grad_norm": norm,
                "ms_per_iteration": round(seconds * 1000, 3),
                "tokens_per_second": round(train.global_batch_size * run.model.seq_len / seconds, 1),
                "data_wait_ms": round(waited * 1000 / len(losses), 3),
            }
            if train_curve is not None:
                train_curve.append(row)
                print(log_line(row, train.iterations, train.global_batch_size), flush=True)
            losses, waited, started = [], 0.0, time.perf_counter()

        paused = time.perf_counter()
        if session.plan.valid.per_epoch and (last or iteration % train.eval_interval == 0):
            validated = _validate(session, progress)
            if valid_curve is not None:
                valid_curve.append(validated)
        if last or iteration % train.save_interval == 0:
            saved = checkpoint.save(folder, session.parameters, session.optimizer, progress, session.plan)
            if speaks:
                print(f"saved {saved}", flush=True)
        started += time.perf_counter() - paused  # only training counts as time per iteration
    return saved


def step_batches(session: Session, consumed: int) -> Iterator[list[Batch]]:
    """This process' micro-batches from sample `consumed` on, those of one optimiser step at a time, without end.

    Threads read two steps ahead. Close the iterator to stop them.
    """
    run = session.plan.run
    read = partial(
        read_batch, session.plan.train, replace(session.plan.form, pinned=session.world.device.type == "cuda")
    )
    with closing(threaded_map(read, _numbers(session, consumed), run.train.readers, 2 * run.accumulation)) as batches:
        yield from batched(batches, run.accumulation)


def _numbers(session: Session, consumed: int) -> Iterator[range]:
    run = session.plan.run
    return micro_batches(consumed, run.train.micro_batch_size, session.data_rank, run.parallel.data)


def train_step(session: Session, iteration: int, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
    """One optimiser step over this process' part of a global batch; returns the mean loss and the gradient's norm.

    `iteration` counts from 1. Both results stay on the device, equal on all ranks. Every target of the global batch
    that counts weighs the same, in whatever micro-batch and on whatever rank it is.
    """
    run, mesh = session.plan.run, session.mesh
    session.streams.start_iteration(iteration)
    counted = _over_data(session, torch.tensor(sum(batch.counted for batch in batches), device=session.world.device))
    # gradients are averaged over data-parallel ranks, so that each must see `data` times its share
    loss = run_micro_batches(session, batches, run.parallel.data / counted, train=True)
    settle(session.parameters, mesh)
    grad_norm = clip(session.parameters, run.train.clip_grad, mesh)
    set_learning_rate(session.optimizer, rate)
    session.optimizer.step()
    session.optimizer.zero_grad()
    return _over_all(session, loss) / run.parallel.data, grad_norm


def run_micro_batches(session: Session, batches: Sequence[Batch], factor: Tensor | float, train: bool) -> Tensor:
    """The micro-batches of one step forward and, to train, backward; their summed losses times `factor`, shape ().

    Zero on every process but those of the pipeline's last stage.
    """
    device = session.world.device
    batches = [batch.to(device) for batch in batches]
    with loss_parallel(), torch.set_grad_enabled(train):
        if session.pipeline is not None:
            return session.pipeline.run(batches, factor, train)
        (stage,) = session.stages
        total = torch.zeros((), device=device)
        for number, batch in enumerate(batches):
            if train:
                before_backward(stage, number == len(batches) - 1, session.plan.run.parallel.zero_stage)
            loss = stage(batch.tokens, batch.positions, batch.targets).sum() * factor
            if train:
                loss.backward()
            total += loss.detach()
    return total


def _over_data(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks (a collective call)."""
    if session.mesh is not None and session.plan.run.parallel.data > 1:
        dist.all_reduce(value, group=session.mesh.get_group("dp"))
    return value


def _over_all(session: Session, value: Tensor) -> Tensor:
    """The sum over data-parallel ranks and pipeline stages (a collective call)."""
    if session.mesh is not None and session.plan.run.parallel.pipeline > 1:
        dist.all_reduce(value, group=session.mesh.get_group("pp"))
    return _over_data(session, value)


def validation_loss(session: Session, samples: int) -> float:
    """Mean loss in nats a token over the first validation samples (a collective call, equal on all ranks).

    Whole global batches pass through the layout; what goes past `samples` weighs nothing.
    """
    run, form = session.plan.run, session.plan.form

    def read(numbers: range) -> Batch:
        return masked(read_batch(session.plan.valid, form, numbers), max(0, samples - numbers.start))

    steps = -(-samples // run.train.global_batch_size)
    numbers = islice(_numbers(session, 0), steps * run.accumulation)
    total = torch.zeros(2, dtype=torch.float64, device=session.world.device)  # sum of losses, targets
    for stage in session.stages:
        stage.eval()
    with closing(threaded_map(read, numbers, 1, 2 * run.accumulation)) as batches:
        for step in batched(batches, run.accumulation):
            total[0] += _over_all(session, run_micro_batches(session, step, 1.0, train=False))
            counted = torch.tensor(sum(batch.counted for batch in step), device=total.device)
            total[1] += _over_data(session, counted)
    for stage in session.stages:
        stage.train()
        drop_gathered(stage)
    return float(total[0] / total[1])


def _validate(session: Session, progress: Progress) -> dict[str, Any]:
    train, valid = session.plan.run.train, session.plan.valid
    loss = validation_loss(session, min(valid.per_epoch, train.eval_batches * train.global_batch_size))
    if session.world.rank == 0:
        print(
            f"validation at iteration {progress.iteration} | lm loss: {loss:.6E} | perplexity: {math.exp(loss):.4f}",
            flush=True,
        )
    row = (progress.iteration, progress.consumed_samples, loss, math.exp(loss))
    return dict(zip(VALID_COLUMNS, row, strict=True))


def _write_done(folder: Path, last: Manifest) -> None:
    """RUN/done.json: where the run ended, from its files alone."""
    train, valid = read_rows(folder / "train.csv"), read_rows(folder / "valid.csv")
    write_json(
        folder / "done.json",
        {
            "iteration": last.progress.iteration,
            "checkpoint": last.path.name,
            "consumed_samples": last.progress.consumed_samples,
            "train_loss": float(train[-1]["lm_loss"]) if train else None,
            "valid_loss": float(valid[-1]["loss"]) if valid else None,
        },
    )
