"""The training of one model, from the start of a job to its last checkpoint. Every process of the job runs this.

`run_training` locks the model folder, builds the model, loads the newest checkpoint and calls `Trainer.run`: each
iteration trains one step (`training.step`), and reports, validates and saves when due.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from common import run_card
from common.console import say, warn
from common.errors import ConfigError, InputError
from common.files import read_rows, write_json, write_text
from common.settings import Experiment, GenerateSettings, TrainSettings, changes
from common.tokenizer import Tokenizer
from corpus.index import suffixed
from training import checkpoint
from training.checkpoint import Manifest, Progress
from training.checkpoint.writing import CheckpointWriter
from training.dataset.batches import Batch
from training.dataset.blend import Blend, Splits
from training.huggingface.pretrained import load_finetune
from training.inference.sampling import sample_token
from training.launch.preflight import checkpoint_bytes, preflight
from training.launch.process_group import World
from training.metrics.boards import open_boards
from training.metrics.logger import MetricsLogger
from training.metrics.timers import Timers
from training.monitoring import blame
from training.monitoring.guard import Guard, first_non_finite
from training.monitoring.heartbeat import Heartbeat
from training.monitoring.run_lock import RunLock
from training.monitoring.stop import LEAVE, SAVE, Stop
from training.operations import choose_operations
from training.optimizer import learning_rate, make_optimizer, rate_change, steps_taken
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.layout import build_model, coordinates, make_mesh, named_parameters
from training.parallel.pipeline import Pipeline
from training.parallel.randomness import RandomStreams
from training.planning.run import Plan, duration
from training.step import (
    Session,
    Step,
    next_logits,
    run_micro_batches,
    step_batches,
    target_losses,
    train_step,
    validate,
)

_SAMPLED = 32  # tokens of a text that shows how the run goes
_LONGEST = 28 * 24 * 3600  # seconds of a run on CPUs; a busy machine may seem several times slower than it is


def run_training(plan: Plan, folder: Path, world: World, settings: str) -> bool:
    """Train the model of `folder` from its newest checkpoint or from the start; returns whether it is finished.

    If asked to stop early, it saves a checkpoint first; the next start resumes from it. The plan is printed and written
    to plan.json, and `settings` to settings.yaml, unless the model is finished already.
    """
    experiment, data, on_rank0 = plan.experiment, plan.data, world.rank == 0
    train = experiment.train
    newest = checkpoint.newest(folder)
    if newest is not None:
        fits = partial(checkpoint.check_fits, newest, name=folder.name, experiment=experiment, data=data.train)
        run_on_all_ranks(fits if on_rank0 else lambda: None)
        if end := newest.progress.end(train):
            if on_rank0:
                say(f"{newest.path}: already at {end}")
                _write_done(folder, newest, train)
            return True

    lock = RunLock(folder, world.rank, world.launch.key)
    lock.take()
    start = newest.progress if newest is not None else Progress(0, 0)
    if on_rank0:
        if newest is not None:
            say(f"resumed from {newest.path}: {train.iterations - start.iteration:,} iterations left")
            then, now = (
                {key: one.recipe[key] for key in ("model", "train")} for one in (newest.experiment, experiment)
            )
            if changed := changes(then, now):
                say(f"changed since {newest.path.name}: {', '.join(changed)}")
        kept = plan.as_dict(start.iteration, start.consumed_samples)
        say(kept["text"])
        write_json(folder / "plan.json", kept)
        write_text(folder / "settings.yaml", settings)
        _write_card(folder, [experiment.finetune] if experiment.finetune else [], data.train, world)
        _ = data.train.content  # cached now: the files may change during the run
        (folder / "done.json").unlink(missing_ok=True)  # it was finished before train.iterations was raised
    job = f"{world.launch.key}-{lock.token}"
    with Heartbeat(folder, world.rank, experiment.watch.silence_seconds, job) as heartbeat:
        mesh = make_mesh(experiment.parallel, world.device.type)
        preflight(world, mesh, folder, checkpoint_bytes(experiment.model))
        heartbeat.beat(0, "operations")  # may take minutes, in which the other ranks wait
        choose_operations(experiment, world, folder, plan.seconds)
        session = open_session(experiment, world, mesh)
        progress = _load(session, newest, plan)
        if newest is None and world.device.type == "cpu" and not train.allow_slow:
            _check_speed(session, data.train, folder.name)
        config, at = experiment.model_dump(mode="json"), progress.iteration
        boards = open_boards(experiment.log, folder.name, folder, at, config, on_rank0=on_rank0)
        state = (session.parameters, session.optimizer)
        with (
            Stop(folder, lock) as stop,  # before it, a signal ends the process at once
            CheckpointWriter(folder, *state, experiment, plan.tokenize, data.train, lock.require, lock.token) as writer,
            MetricsLogger(folder, experiment, world, session.timers, boards, progress, lock.is_held) as logger,
        ):
            guard = Guard(train, experiment.watch, progress.guard)
            tokenizer = plan.tokenizer if train.sample_interval else None
            trainer = Trainer(session, data, folder, lock, stop, heartbeat, guard, writer, logger, progress, tokenizer)
            with closing(step_batches(session, data.train, progress.consumed_samples)) as batches:
                trainer.run(batches)
    with suppress(OSError):  # the run is over; its lock is only tidied up
        lock.release()
    return bool(trainer.progress.end(train))


def open_session(experiment: Experiment, world: World, mesh: DeviceMesh | None = None) -> Session:
    """Build the model, its optimiser and its random streams in the experiment's layout (a collective call).

    `mesh` is the layout's mesh, if the caller has it already.
    """
    parallel = experiment.parallel
    mesh = mesh or make_mesh(parallel, world.device.type)
    stages = build_model(experiment, mesh, world.device)
    pipeline = None
    if mesh and parallel.pipeline > 1:
        shape = (experiment.train.micro_batch_size, experiment.model.seq_len, experiment.model.n_embd)
        pipeline = Pipeline(stages, parallel, shape, experiment.accumulation, mesh, world.device)
    pp, dp, tp = coordinates(mesh)
    streams = RandomStreams(experiment.train.seed, (pp, dp, tp) if parallel.sequence_parallel else (pp, dp))
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        for stage in stages:
            streams.attach(stage, tp)
    parameters = named_parameters(stages)
    optimizer = make_optimizer(parameters, experiment.train)
    return Session(experiment, world, mesh, stages, pipeline, parameters, optimizer, streams, Timers(world.device))


def _load(session: Session, newest: Manifest | None, plan: Plan) -> Progress:
    """Load the newest checkpoint, or the weights to fine-tune; returns the progress of the run."""
    experiment = session.experiment
    if newest is not None:
        checkpoint.load(newest, session.parameters, session.optimizer)
        if session.world.rank == 0:
            taken = steps_taken(session.optimizer)
            if change := rate_change(newest.experiment.train, experiment.train, taken):
                say(change)
        return newest.progress
    if experiment.finetune is not None:
        start, seed = experiment.finetune, experiment.train.seed
        new = load_finetune(session.parameters, experiment.model, start, plan.tokenizer, seed)
        if new and session.world.rank == 0:
            say(f"{new} tokens are not in {start}: their embeddings start from random values")
    return Progress(0, 0)


def _check_speed(session: Session, data: Blend, name: str) -> None:
    """Raise ConfigError if a run on CPUs would take months (a collective call): three passes say so, the best of them.

    A pass is one micro-batch forward and backward, or what a pipeline runs at once. It changes no number of the run:
    each step seeds its random streams and drops old gradients.
    """
    experiment = session.experiment
    with closing(step_batches(session, data, 0)) as batches:
        batch = next(batches)[: None if session.pipeline else 1]
    step = math.inf  # seconds
    for _ in range(3):
        session.streams.start_iteration(1)
        begun = time.perf_counter()
        run_micro_batches(session, batch, 1.0, train=True)
        elapsed = max(all_gather(time.perf_counter() - begun))
        step = min(step, elapsed * experiment.accumulation / len(batch))
        session.optimizer.zero_grad()
        session.timers.take()
        if step * experiment.train.iterations <= _LONGEST:
            return
    raise ConfigError(
        f"models.{name} would take {duration(step * experiment.train.iterations)} on these CPUs, at {step:.3g} s per "
        "iteration (the best of three); train a smaller model, or on GPUs, or set train.allow_slow=true to start anyway"
    )


@dataclass
class Trainer:
    """The training loop and what it works with."""

    session: Session
    data: Splits
    folder: Path
    lock: RunLock
    stop: Stop
    heartbeat: Heartbeat
    guard: Guard
    writer: CheckpointWriter
    logger: MetricsLogger
    progress: Progress
    tokenizer: Tokenizer | None
    """For the texts of train.sample_interval."""
    blamed: list[int] = field(default_factory=list)
    """Iterations whose documents were named. Each costs a third of a step, and 0.25 MB with 512 samples."""

    def run(self, batches: Iterator[list[Batch]]) -> None:
        """Step, report, validate and save until the last iteration, or until asked to stop or nothing improves."""
        train = self.session.experiment.train
        taken = steps_taken(self.session.optimizer)  # position in the learning-rate schedule
        for iteration in range(self.progress.iteration + 1, train.iterations + 1):
            step = self._step(iteration, batches, learning_rate(taken, train))
            taken += step.taken
            last = iteration == train.iterations
            if last or iteration % train.log_interval == 0:
                self.logger.report(iteration, self.progress.consumed_samples, self.guard.scale)
            left = self.logger.seconds_left(iteration)
            self.heartbeat.progress = {"done": iteration, "loss": round(step.loss, 4), "seconds_left": round(left)}
            self.progress = replace(self.progress, journal=self.logger.state())
            with self.logger.pause():
                self._validate(last, taken)
                self._sample()
                end = self.progress.end(train)
                if end and self.data.test:
                    self._report_loss(self.data.test, "test")
                best = train.keep_best and self.progress.best.get("iteration") == iteration
                if end or best or step.stop == SAVE or iteration % train.save_interval == 0:
                    self.heartbeat.beat(iteration, "save")
                    self.writer.save(self.progress)
            if step.stop == SAVE:
                self._end_early(bool(end))
            if end or step.stop == SAVE:
                break
        self._end()

    def _step(self, iteration: int, batches: Iterator[list[Batch]], rate: float) -> Step:
        """Read one global batch and train on it. Raises TrainingError if the run must not continue."""
        session, guard = self.session, self.guard
        self.heartbeat.beat(iteration, "data")
        asked = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - asked
        self.heartbeat.beat(iteration, "step")
        accepts = partial(self._accepts, iteration, batch)
        step = train_step(session, iteration, batch, rate, guard.scale, accepts, self.stop.poll())
        guard.record_step(step.loss, step.grad_norm)
        if step.stop == LEAVE:
            self.lock.require_on_all_ranks()
        guard.check(iteration, partial(_find_non_finite, session, batch))
        self.logger.record_step(step.loss, step.grad_norm, step.taken, rate, waited)
        if guard.spike and session.world.rank == 0:
            warn(f"iteration {iteration}: {guard.spike}")
        consumed = self.progress.consumed_samples + session.experiment.train.global_batch_size
        self.progress = Progress(iteration, consumed, guard.state(), best=self.progress.best)
        return step

    def _accepts(self, iteration: int, batches: Sequence[Batch], loss: float, grad_norm: float) -> bool:
        """The guard's decision on a step. First the documents of a bad one are named, while its weights are there."""
        problem = self.guard.problem(loss, grad_norm)
        recent = sum(iteration - other < 100 for other in self.blamed)  # one divergence leaves some for later
        if problem and recent < 20 and len(self.blamed) < 100:
            self.blamed.append(iteration)
            consumed = self.progress.consumed_samples
            losses = target_losses(self.session, batches, consumed)
            ranks = all_gather(blame.sample_rows(self.data.train, consumed, losses))
            if self.session.world.rank == 0 and self.lock.is_held():
                blame.write(self.folder, iteration, loss, problem, [row for rows in ranks for row in rows])
        return self.guard.accepts(loss, grad_norm)

    def _validate(self, last: bool, taken: int) -> None:
        """The validation loss, every eval_interval and in the last iteration, after `taken` optimiser steps."""
        iteration, train = self.progress.iteration, self.session.experiment.train
        if self.data.valid.per_epoch and (last or iteration % train.eval_interval == 0):
            self.heartbeat.beat(iteration, "validation")
            self.progress = self.progress.with_loss(self._report_loss(self.data.valid, "valid"), taken)

    def _sample(self) -> None:
        """Every sample_interval: a text that the weights of now write. It draws from no stream of the training."""
        iteration, train = self.progress.iteration, self.session.experiment.train
        if self.tokenizer is None or iteration % train.sample_interval:
            return
        self.heartbeat.beat(iteration, "sample")
        options = GenerateSettings(seed=train.seed)
        generator = torch.Generator().manual_seed(options.seed)
        text = [*self.tokenizer.encode(train.sample_prompt).tolist()] or [self.tokenizer.end_of_text]
        for _ in range(_SAMPLED):
            text.append(sample_token(next_logits(self.session, text), options, generator))
            if text[-1] == self.tokenizer.end_of_text:
                break
        self.logger.say(f"sample at iteration {iteration} | {self.tokenizer.decode(text)!r}")

    def _report_loss(self, blend: Blend, part: str) -> float:
        """Report the loss on the first `train.eval_batches` global batches, or on all samples if there are fewer."""
        train = self.session.experiment.train
        count = min(blend.per_epoch, train.eval_batches * train.global_batch_size)
        loss = validate(self.session, blend, count)
        self.logger.report_validation(self.progress.iteration, self.progress.consumed_samples, loss, part)
        return loss

    def _end_early(self, last: bool) -> None:
        """After the save that a stop request asked for: log who asked."""
        reasons = " and ".join(sorted({reason for reason in all_gather(self.stop.reason) if reason}))
        self.writer.wait()
        if not last and self.session.world.rank == 0:
            iteration = self.progress.iteration
            say(f"asked to stop by {reasons}: stopped after iteration {iteration}; start again to go on")
        self.stop.mark_stopped()

    def _end(self) -> None:
        """Wait for the last checkpoint; write done.json if the run is finished."""
        self.writer.wait()
        self.lock.require_on_all_ranks()
        train = self.session.experiment.train
        if (end := self.progress.end(train)) and self.session.world.rank == 0:
            assert self.writer.newest is not None
            if self.progress.iteration < train.iterations:
                say(f"ended at {end}")
            _write_done(self.folder, checkpoint.read_manifest(self.writer.newest), train)


def _find_non_finite(session: Session, batches: Sequence[Batch]) -> str:
    """The first module with non-finite numbers in the last step, on these micro-batches (a collective call)."""
    models = [stage.model for stage in session.stages]
    return first_non_finite(models, session.parameters, partial(run_micro_batches, session, batches, 1.0, train=False))


def _write_card(folder: Path, start: Sequence[Path], data: Blend, world: World) -> None:
    """Write MODEL_FOLDER/run.json, the card of this start, which may `start` from weights."""
    prefixes = [part.corpus.prefix for part in data.parts]
    inputs = [*(suffixed(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx")), *start]
    more = {"job": world.launch.key, "processes": world.size}
    run_card.write_card(folder / run_card.NAME, settings=folder / "settings.yaml", inputs=inputs, **more)


def _write_done(folder: Path, last: Manifest, train: TrainSettings) -> None:
    """Write MODEL_FOLDER/done.json: where the run ended, taken from its files alone."""
    early = {"validations_without_improvement": last.best.get("since", 0)} if last.iteration < train.iterations else {}
    write_json(
        folder / "done.json",
        {
            "iteration": last.progress.iteration,
            "checkpoint": last.path.name,
            "consumed_samples": last.progress.consumed_samples,
            "train_loss": _last_value(folder / "train.csv", "lm_loss"),
            "valid_loss": _last_value(folder / "valid.csv", "loss"),
            **early,
        },
    )


def _last_value(curve: Path, column: str) -> float | None:
    """The last value of a curve; None if the file is missing or damaged, which does not make a run unfinished."""
    try:
        return float(read_rows(curve)[-1][column])
    except (LookupError, ValueError, TypeError, InputError):
        return None
