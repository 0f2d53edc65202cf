"""What a run tells: its log lines, its curves, its progress.

    with Journal(session, folder, progress) as journal:
        journal.step(step, rate, waited)                # after every step
        journal.report(progress, guard)                 # at intervals
        journal.validated(progress, loss)
        journal.state()                                 # with a checkpoint: what is not reported yet

Every process has one; rank 0's speaks: lines on stdout, rows of train.csv and valid.csv, TensorBoard, Weights & Biases,
and on a terminal a progress bar on stderr.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from common.console import say, warn
from common.files import write_json
from common.progress import Meter
from training.checkpoint import Progress
from training.evaluation.scoring import perplexity
from training.metrics.boards import Board, open_boards
from training.metrics.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, figures_line, log_line
from training.metrics.flops import CONVENTION, flops_per_token, peak_tflops
from training.metrics.memory import memory
from training.metrics.since import Since
from training.monitoring.guard import Guard
from training.parallel.distributed import all_gather
from training.precision import precision_type
from training.session import Session
from training.step import PARTS, Step


class Journal:
    """The figures of a run since its last report, and where they go.

    `mine` says on rank 0 whether the run's folder is still this job's; nothing is written there when it is not.
    """

    def __init__(
        self, session: Session, folder: Path, progress: Progress, mine: Callable[[], bool] = lambda: True
    ) -> None:
        self.session, self.folder, self._mine = session, folder, mine
        experiment, device = session.plan.experiment, session.world.device
        self.speaks = session.world.rank == 0
        self._flops = flops_per_token(experiment.model)
        self._peak = peak_tflops(device, experiment.train.precision, experiment.log.peak_tflops)
        self._boards: list[Board] = open_boards(
            experiment, session.plan.name, folder, progress.iteration, on_rank0=self.speaks
        )
        self._curves: dict[str, Curve] = {}
        self._meter: Meter | None = None
        if self.speaks:
            for name, columns in (("train", TRAIN_COLUMNS), ("valid", VALID_COLUMNS)):
                self._curves[name] = Curve(folder / f"{name}.csv", columns, progress.iteration)
            if sys.stderr.isatty():
                self._meter = Meter(
                    f"train {session.plan.name}", "iterations", experiment.train.iterations, progress.iteration
                )
        self.say(self._arithmetic())
        self._memory_told = False
        self._first: tuple[float, int] | None = None  # when this start's first step was done, and steps since
        self._start()
        self._since.restore(progress.journal)

    def __enter__(self) -> "Journal":
        if self._meter is not None:
            self._meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)
        for board in self._boards:
            try:
                board.close(kind is None)
            except Exception as problem:  # the run is at its end: what it has to show is in its files
                warn(f"{type(board).__name__}: {problem}")

    def _start(self) -> None:
        self._since = Since()
        self._steps = 0  # of them, those of this start
        self._rate = self._waited = 0.0
        self._started = time.perf_counter()

    def _arithmetic(self) -> str:
        """What TFLOPs and MFU mean in this run."""
        device, experiment = self.session.world.device, self.session.plan.experiment
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        precision = str(precision_type(experiment.train.precision, device)).removeprefix("torch.")
        peak = f"peak {self._peak:g} TFLOP/s each"
        if not self._peak:
            peak = f"no known peak, so no MFU (models.{self.session.plan.name}.log.peak_tflops sets one)"
        return (
            f"{'device':<12}{self.session.world.size} x {name}, {precision}, {peak}\n"
            f"{'arithmetic':<12}{self._flops / 1e9:.4g} GFLOP a token ({CONVENTION}: without wpe, attention in full, "
            "no recompute)"
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no training: only training counts as time per iteration."""
        paused = time.perf_counter()
        yield
        self._started += time.perf_counter() - paused

    def state(self) -> dict[str, Any]:
        """What a resumed run must know for its first row: JSON, empty right after a report."""
        return self._since.state()

    def step(self, step: Step, rate: float, waited: float) -> None:
        """Note a step, its learning rate, and the seconds that it waited for data."""
        self._since.add(step)
        self._steps += 1
        self._rate = rate
        self._waited += waited
        self.session.timers.collect()
        begun, count = self._first or (time.perf_counter(), -1)
        self._first = begun, count + 1
        if self._meter is not None:
            self._meter.advance(note=f"loss {step.loss:.4f}")

    def report(self, progress: Progress, guard: Guard) -> None:
        """Log lines, and a row of train.csv, about the steps since the last report (a collective call).

        Loss and counts are of all of them, times of those that this start has done.
        """
        count = self._steps
        parts = self.session.timers.take()  # waits for the device
        seconds = (time.perf_counter() - self._started) / count
        used = memory(self.session.world.device)
        *slowest, waited, most = self._largest(
            [*(parts.get(part, 0.0) / count for part in PARTS), self._waited / count, list(used.values())[-1]]
        )
        everyone = [] if self._memory_told else all_gather(used)
        self._memory_told = True
        if self.speaks:
            train = self.session.plan.experiment.train
            row = self._row(progress, guard, seconds, waited, most)
            if self._mine():
                self._curves["train"].append(row)
            self.say(log_line(row, train.iterations, train.global_batch_size, self._left(progress, seconds)))
            times = {part: value * 1000 for part, value in zip(PARTS, slowest, strict=True) if value}
            self.say(figures_line("time (ms)", {**times, "batch generator": waited * 1000}, 2))
            if everyone:
                rank = max(range(len(everyone)), key=lambda rank: list(everyone[rank].values())[-1])  # has taken most
                head = f"[Rank {rank}] (after {progress.iteration} iterations) memory (MB)"
                self.say(figures_line(head, everyone[rank], 1))
            self._show(progress.iteration, train=row, time=times)
        self._start()

    def _row(self, progress: Progress, guard: Guard, seconds: float, waited: float, memory_mb: float) -> dict[str, Any]:
        """TRAIN_COLUMNS about the steps since the last report: seconds an iteration, and waiting for data in them."""
        experiment, since = self.session.plan.experiment, self._since
        tokens_per_second = experiment.train.global_batch_size * experiment.model.seq_len / seconds
        tflops = self._flops * tokens_per_second / self.session.world.size / 1e12
        return {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * experiment.model.seq_len,
            "learning_rate": self._rate,
            "lm_loss": since.loss,
            "grad_norm": since.grad_norm,
            "ms_per_iteration": round(seconds * 1000, 3),
            "tokens_per_second": round(tokens_per_second, 1),
            "data_wait_ms": round(waited * 1000, 3),
            "loss_scale": guard.scale,
            "skipped": since.skipped,
            "non_finite": since.non_finite,
            "tflops": float(f"{tflops:.5g}"),
            "mfu": round(tflops / self._peak, 5) if self._peak else None,
            "memory_mb": round(memory_mb, 1),
        }

    def _largest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks (a collective call)."""
        if self.session.world.size == 1:
            return values
        numbers = torch.tensor(values, dtype=torch.float64, device=self.session.world.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        largest: list[float] = numbers.tolist()
        return largest

    def _left(self, progress: Progress, seconds: float) -> float:
        """Seconds to the last iteration, at the pace since this start's first step, with validation and saving."""
        begun, count = self._first or (0.0, 0)
        if count:
            seconds = (time.perf_counter() - begun) / count
        return seconds * (self.session.plan.experiment.train.iterations - progress.iteration)

    def validated(self, progress: Progress, loss: float, part: str = "valid") -> None:
        """The loss on a part of the data: a line, and a row of valid.csv, or for another part RUN/<part>.json."""
        if not self.speaks:
            return
        row: dict[str, Any] = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        if not self._mine():
            pass
        elif part in self._curves:
            self._curves[part].append(row)
        else:
            write_json(self.folder / f"{part}.json", row)
        name = "validation" if part == "valid" else part
        figures = f"lm loss: {loss:.6E} | perplexity: {row['perplexity']:.6g}"
        self.say(f"{name} at iteration {progress.iteration} | {figures}")
        self._show(progress.iteration, **{part: row})

    def _show(self, iteration: int, **parts: Mapping[str, Any]) -> None:
        """Bring the figures of an iteration to the boards, those that are finite."""
        figures = {
            f"{part}/{name}": value
            for part, row in parts.items()
            for name, value in row.items()
            if name != "iteration" and value is not None and math.isfinite(value)
        }
        for board in list(self._boards) if self._mine() else ():
            try:
                board.show(figures, iteration)
            except OSError as error:  # the curves are in the CSV files, too
                self._boards.remove(board)
                with suppress(OSError):
                    board.close(False)
                where = error.filename or f"{self.folder}/{type(board).__name__.lower()}"
                self.say(f"warning: {where}: {error.strerror or error}; {type(board).__name__} shows no more")

    def say(self, text: str) -> None:
        """One line of rank 0."""
        if self.speaks:
            say(text)
