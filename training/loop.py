"""The training loop: what one process does between the start of a job and its last checkpoint."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from common.config import write_settings
from common.files import read_rows, write_json
from common.settings import Settings
from common.workers import batched
from training import checkpoint
from training.batches import Batch, micro_batches, prefetched, read_batch
from training.checkpoint import Manifest, Progress
from training.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, log_line
from training.distributed import World, one_voice
from training.model import GPT2, summed_loss
from training.optimizer import learning_rate, make_optimizer, set_learning_rate
from training.parallel import build_model, make_mesh, plain
from training.plan import Plan
from training.randomness import RandomStreams
from training.validation import autocast, mean_loss, validation_samples


@dataclass
class Session:
    """Everything one process holds while it trains."""

    plan: Plan
    world: World
    mesh: DeviceMesh | None
    model: GPT2
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
        checkpoint.load(newest, session.model, session.optimizer)
        progress = newest.progress
        if world.rank == 0:
            print(f"resumed from {newest.path}", flush=True)
    last = _iterate(session, settings, folder, progress)
    if world.rank == 0:
        _write_done(folder, checkpoint.read_manifest(last))


def open_session(plan: Plan, world: World) -> Session:
    """Build the model, its optimiser and its random streams in the plan's layout (a collective call)."""
    run = plan.run
    mesh = make_mesh(run.parallel, world.device.type)
    model = build_model(run, mesh, world.device)
    data_rank, tensor_rank = (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) if mesh else (0, 0)
    streams = RandomStreams(run.train.seed, data_rank, tensor_rank, world.device)
    if run.parallel.tensor > 1:
        streams.attach(model)
    return Session(plan, world, mesh, model, make_optimizer(model, run.train), streams)


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
            norm = float(plain(grad_norm))
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
            saved = checkpoint.save(folder, session.model, session.optimizer, progress, session.plan)
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
    numbers = micro_batches(consumed, run.train.micro_batch_size, session.data_rank, run.parallel.data)
    with closing(prefetched(read, numbers, run.train.readers, ahead=2 * run.accumulation)) as batches:
        yield from batched(batches, run.accumulation)


def train_step(session: Session, iteration: int, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
    """One optimiser step over this process' part of a global batch; returns the mean loss and the gradient's norm.

    `iteration` counts from 1. Both results stay on the device. Every target of the global batch that counts weighs the
    same, in whatever micro-batch and on whatever rank it is.
    """
    run, model, device = session.plan.run, session.model, session.world.device
    session.streams.start_iteration(iteration)
    counted = torch.tensor(sum(batch.counted for batch in batches), device=device)
    if session.mesh is not None and run.parallel.data > 1 and run.train.eod_mask_loss:
        dist.all_reduce(counted, group=session.mesh.get_group("dp"))
    else:
        counted *= run.parallel.data
    total = torch.zeros((), device=device)
    for number, batch in enumerate(batch.to(device) for batch in batches):
        if run.parallel.data > 1:
            model.set_requires_gradient_sync(number == len(batches) - 1)  # type: ignore[operator]  # replicate()'s
        with loss_parallel():
            with autocast(run.train.precision, device):
                # gradients are averaged over data-parallel ranks, so that each must see `data` times its share
                loss = summed_loss(model(batch.tokens, batch.positions), batch.targets) * (run.parallel.data / counted)
            loss.backward()  # type: ignore[no-untyped-call]
        total += plain(loss.detach())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip_grad)
    set_learning_rate(session.optimizer, rate)
    session.optimizer.step()
    session.optimizer.zero_grad()
    if session.mesh is not None and run.parallel.data > 1:
        dist.all_reduce(total, group=session.mesh.get_group("dp"))
        total /= run.parallel.data
    return total, grad_norm


def _validate(session: Session, progress: Progress) -> dict[str, Any]:
    train, valid = session.plan.run.train, session.plan.valid
    count = validation_samples(valid, train)
    form, micro = session.plan.form, train.micro_batch_size
    loss = mean_loss(session.model, valid, count, micro, train.precision, form, session.mesh)
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
