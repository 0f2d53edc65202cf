"""What a run tells: its log line, its curves, its validation.

    with Journal(session, folder, progress) as journal:
        journal.step(step, rate, waited)                # after every step
        journal.report(progress, guard)                 # at intervals
        journal.validated(progress, loss)

Every process has one; rank 0's speaks.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from training.checkpoint import Progress
from training.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, log_line
from training.guard import Guard
from training.session import Session
from training.step import Step


class Journal:
    """The figures of a run since its last report, and where they go."""

    def __init__(self, session: Session, folder: Path, progress: Progress) -> None:
        self.session, self.folder = session, folder
        self.speaks = session.world.rank == 0
        self._curves: dict[str, Curve] = {}
        if self.speaks:
            for name, columns in (("train", TRAIN_COLUMNS), ("valid", VALID_COLUMNS)):
                self._curves[name] = Curve(folder / f"{name}.csv", columns, progress.iteration)
        self._start()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def _start(self) -> None:
        self._steps: list[Step] = []
        self._rate = self._waited = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no training: only training counts as time per iteration."""
        paused = time.perf_counter()
        yield
        self._started += time.perf_counter() - paused

    def step(self, step: Step, rate: float, waited: float) -> None:
        """Note a step, its learning rate, and the seconds that it waited for data."""
        self._steps.append(step)
        self._rate = rate
        self._waited += waited

    def report(self, progress: Progress, guard: Guard) -> None:
        """The log line, and a row of train.csv, about the steps since the last report."""
        run, count = self.session.plan.run, len(self._steps)
        seconds = (time.perf_counter() - self._started) / count
        finite = [step.loss for step in self._steps if math.isfinite(step.loss)]
        row = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * run.model.seq_len,
            "learning_rate": self._rate,
            "lm_loss": fmean(finite) if finite else math.nan,
            "grad_norm": self._steps[-1].grad_norm,
            "ms_per_iteration": round(seconds * 1000, 3),
            "tokens_per_second": round(run.train.global_batch_size * run.model.seq_len / seconds, 1),
            "data_wait_ms": round(self._waited * 1000 / count, 3),
        }
        if self.speaks:
            self._curves["train"].append(row)
            print(log_line(row, run.train.iterations, run.train.global_batch_size), flush=True)
        self._start()

    def validated(self, progress: Progress, loss: float) -> None:
        """A validation loss: a line, and a row of valid.csv."""
        if self.speaks:
            row: dict[str, Any] = {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "loss": loss,
                "perplexity": math.exp(loss),
            }
            self._curves["valid"].append(row)
            figures = f"lm loss: {loss:.6E} | perplexity: {math.exp(loss):.4f}"
            print(f"validation at iteration {progress.iteration} | {figures}", flush=True)

    def say(self, text: str) -> None:
        """One line of rank 0."""
        if self.speaks:
            print(text, flush=True)
