"""The training loop: each iteration takes one step, then reports, validates and saves if due.

`training.job` opens what the loop works with.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from common.console import say, warn
from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from training.checkpoint import Progress
from training.checkpoint.writing import CheckpointWriter
from training.dataset.batches import Batch
from training.dataset.blend import Blend, Splits
from training.inference.sampling import sample_token
from training.metrics.logger import MetricsLogger
from training.monitoring import blame
from training.monitoring.guard import Guard
from training.monitoring.heartbeat import Heartbeat
from training.monitoring.outputs import first_non_finite, next_logits, target_losses
from training.monitoring.run_lock import RunLock
from training.monitoring.stop import LEAVE, SAVE, Stop
from training.optimizer import learning_rate, steps_taken
from training.parallel.collectives import all_gather
from training.session import Session
from training.step import StepResult, compute_gradients, update_weights, validate

_SAMPLED = 32  # tokens of a text that shows how the run goes


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
    tokenizer: Tokenizer | None  # for the texts of train.sample_interval
    begin: Sequence[Callable[[int], None]] = ()  # called before each iteration with its number
    blamed: list[int] = field(default_factory=list)  # iterations whose documents were named
    empty_parts: set[str] = field(default_factory=set)  # parts of the data without targets, once warned about

    def run(self, batches: Iterator[list[Batch]]) -> None:
        """Train to the last iteration, or until asked to stop, or until nothing improves."""
        train = self.session.experiment.train
        taken = steps_taken(self.session.optimizer)  # position in the learning-rate schedule
        for iteration in range(self.progress.iteration + 1, train.iterations + 1):
            for call in self.begin:
                call(iteration)
            step = self._step(iteration, batches, learning_rate(taken, train))
            taken += step.taken
            self._report(step)
            with self.logger.pause():
                self._validate(taken)
                self._sample()
                end = self.progress.end(train)
                if end and self.data.test:
                    self._report_loss(self.data.test, "test")
                best = train.keep_best and self.progress.best.get("iteration") == iteration
                if end or best or step.stop == SAVE or iteration % train.save_interval == 0:
                    self.heartbeat.beat(iteration, "save")
                    self.logger.sync()
                    self.writer.save(self.progress)
            if end or step.stop == SAVE:
                return self._end(end, step.stop == SAVE)

    def _step(self, iteration: int, batches: Iterator[list[Batch]], rate: float) -> StepResult:
        """Read one global batch and train on it. Raises TrainingError if the run must stop."""
        session, guard = self.session, self.guard
        self.heartbeat.beat(iteration, "data")
        begun = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - begun
        self.heartbeat.beat(iteration, "step")
        step = compute_gradients(session, iteration, batch, guard.scale, self.stop.poll())
        if step.stop == LEAVE:
            self.lock.require_on_all_ranks()
        warning = "its documents have been removed: no targets, and no step is taken"
        if step.targets:
            step = step._replace(taken=guard.judge(step.loss, step.grad_norm))
            self._blame(iteration, batch, step.loss)
            guard.check(iteration, partial(first_non_finite, session, batch))
            warning = guard.spike
        if step.taken:
            update_weights(session, step, rate)
        self.logger.record_step(step.loss if step.targets else None, step.grad_norm, step.taken, rate, waited)
        if warning and session.world.rank == 0:
            warn(f"iteration {iteration}: {warning}")
        consumed = self.progress.consumed_samples + session.experiment.train.global_batch_size
        self.progress = Progress(iteration, consumed, guard.state(), best=self.progress.best)
        return step

    def _blame(self, iteration: int, batches: Sequence[Batch], loss: float) -> None:
        """Name the documents of a bad step, by the weights before its update (a collective call).

        It costs a third of a step and 0.25 MB per 512 samples: at most 20 of 100 steps, 100 in all.
        """
        problem = self.guard.problem
        recent = sum(iteration - other < 100 for other in self.blamed)
        if not problem or recent >= 20 or len(self.blamed) >= 100:
            return
        self.blamed.append(iteration)
        consumed = self.progress.consumed_samples
        losses = target_losses(self.session, batches, consumed)
        ranks = all_gather(blame.sample_rows(self.data.train, consumed, losses))
        if self.session.world.rank == 0 and self.lock.is_held():
            blame.write(self.folder, iteration, loss, problem, [row for rows in ranks for row in rows])

    def _report(self, step: StepResult) -> None:
        """The heartbeat's progress and the saved journal; log lines and a row if due."""
        iteration, train = self.progress.iteration, self.session.experiment.train
        figures = {"done": iteration, **({"loss": round(step.loss, 4)} if step.targets else {})}
        left = self.logger.seconds_left(iteration)
        self.heartbeat.report(figures if left is None else {**figures, "seconds_left": round(left)})
        every = min(train.log_interval, max(1, train.iterations // 10))  # short runs have a curve, too
        if iteration in (1, train.iterations) or iteration % every == 0:
            self.logger.report(iteration, self.progress.consumed_samples, self.guard.scale)
        self.progress = replace(self.progress, journal=self.logger.state())

    def _validate(self, taken: int) -> None:
        """Every eval_interval and at the end: the validation loss after `taken` optimiser steps."""
        iteration, train = self.progress.iteration, self.session.experiment.train
        if self.data.valid.per_epoch and (iteration == train.iterations or iteration % train.eval_interval == 0):
            self.heartbeat.beat(iteration, "validation")
            loss = self._report_loss(self.data.valid, "valid")
            self.progress = self.progress.with_loss(loss, taken) if loss is not None else self.progress

    def _sample(self) -> None:
        """Every sample_interval: a text by the current weights, drawn from a stream of its own."""
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

    def _report_loss(self, blend: Blend, part: str) -> float | None:
        """Report the loss on a part's first `train.eval_batches` global batches, or on all samples.

        None, with a warning the first time, if they have no targets.
        """
        train = self.session.experiment.train
        count = min(blend.per_epoch, train.eval_batches * train.global_batch_size)
        loss = validate(self.session, blend, count)
        if loss is not None:
            self.logger.report_validation(self.progress.iteration, self.progress.consumed_samples, loss, part)
        elif part not in self.empty_parts and self.session.world.rank == 0:
            warn(f"the {part} part has no targets in its first {count:,} samples: no loss is computed on it")
            self.empty_parts.add(part)
        return loss

    def _end(self, end: str, asked: bool) -> None:
        """Wait for the last checkpoint, and say why the run ends before its last iteration."""
        self.writer.wait()
        iteration, on_rank0 = self.progress.iteration, self.session.world.rank == 0
        if asked:
            reasons = " and ".join(sorted({reason for reason in all_gather(self.stop.reason) if reason}))
            if not end and on_rank0:
                say(f"asked to stop by {reasons}: stopped after iteration {iteration}; rerun to resume")
            self.stop.mark_stopped()
        self.lock.require_on_all_ranks()
        if end and iteration < self.session.experiment.train.iterations and on_rank0:
            say(f"ended at {end}")
