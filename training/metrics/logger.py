"""Reports a training run: log lines, curves, progress.

    with MetricsLogger(folder, session) as logger:
        logger.record_step(step.loss, step.grad_norm, step.taken, rate, waited)  # every step
        logger.report(iteration, consumed_samples, loss_scale)  # when a row is due
        logger.report_validation(iteration, consumed_samples, loss)
        logger.state()  # saved with a checkpoint

Every rank has a logger; rank 0 writes: lines on stdout, rows of train.csv and valid.csv,
TensorBoard, Weights & Biases, and a progress bar on stderr if that is a terminal.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.console import say, warn
from common.files import write_json
from common.progress import Meter
from training.checkpoint import Progress
from training.evaluation.scoring import perplexity
from training.launch.device import precision_type
from training.metrics.boards import Board
from training.metrics.curves import (
    START_COLUMNS,
    TRAIN_COLUMNS,
    VALID_COLUMNS,
    Curve,
    StepTotals,
    figures_line,
    log_line,
)
from training.metrics.device import PARTS, device_name, memory, peak_tflops
from training.optimizer import adamw_scale
from training.parallel.collectives import all_gather
from training.planning.speed import CONVENTION, flops_per_token
from training.session import Session


class MetricsLogger:
    """The figures of the steps since the last report, and where reports go.

    `progress` is that of the checkpoint that the run resumes from. `may_write`, asked on rank 0:
    whether the model folder is still this job's.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        boards: Sequence[Board] = (),
        progress: Progress = Progress(0, 0),  # noqa: B008 - frozen
        attention: float = 1.0,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        experiment, world = session.experiment, session.world
        self.folder, self.on_rank0, self._may_write = folder, world.rank == 0, may_write
        self._train, self._seq_len = experiment.train, experiment.model.seq_len
        self._world, self._timers, self._boards = world, session.timers, list(boards)
        self._adamw = adamw_scale(experiment.train)
        self._flops = flops_per_token(experiment.model, attention)
        self._attention = "full attention" if attention == 1 else f"{attention:.0%} of attention, within documents"
        self._peak = peak_tflops(world.device, self._train.precision, experiment.log.peak_tflops)  # 0: not known
        self._curves: dict[str, Curve] = {}
        self._meter: Meter | None = None
        at = progress.iteration
        if self.on_rank0:
            for part, columns in (("train", TRAIN_COLUMNS), ("valid", VALID_COLUMNS)):
                self._curves[part] = Curve(folder / f"{part}.csv", columns, at)
            start = {"iteration": at, "time": round(time.time(), 1), "processes": world.size}
            start |= {"consumed_samples": progress.consumed_samples, "nodes": world.launch.nodes}
            self._curves["starts"] = Curve(folder / "starts.csv", START_COLUMNS, at)
            self._curves["starts"].append(start)
            self._meter = Meter(f"train {folder.name}", "iterations", self._train.iterations, at, lines=False)
        self.say(self._describe_device())
        self._memory_reported = False
        self._first_ended, self._later = 0.0, -1  # when this start's first step ended, and steps since
        self._reset()
        self._totals = StepTotals.restored(progress.journal)

    def __enter__(self) -> "MetricsLogger":
        if self._meter is not None:
            self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._meter is not None:
            self._meter.__exit__(*error)
        for board in self._boards:
            try:
                board.close(error[0] is None)
            except Exception as problem:  # the run is over, and the CSV files have all figures
                warn(f"{type(board).__name__}: {problem}")

    def _reset(self) -> None:
        self._totals = StepTotals()
        self._steps = 0  # how many of the steps in the totals this start has done
        self._rate = self._waited = 0.0
        self._started = time.perf_counter()

    def _describe_device(self) -> str:
        """The devices, and how TFLOPs and MFU are computed."""
        device = self._world.device
        precision = str(precision_type(self._train.precision, device)).removeprefix("torch.")
        peak = f"peak {self._peak:g} TFLOP/s each"
        if not self._peak:
            peak = f"no known peak, so no MFU (models.{self.folder.name}.log.peak_tflops sets one)"
        return (
            f"{'device':<12}{self._world.size} x {device_name(device)}, {precision}, {peak}\n"
            f"{'arithmetic':<12}{self._flops / 1e9:.4g} GFLOP per token ({CONVENTION}: without wpe, {self._attention}, "
            "no recompute)"
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside `with` from the time per iteration."""
        paused = time.perf_counter()
        yield
        self._started += time.perf_counter() - paused

    def state(self) -> dict[str, Any]:
        """The sums for a resumed run's first row, as JSON; empty right after a report."""
        return self._totals.state()

    def sync(self) -> None:
        """Wait until all rows are on disk: before a checkpoint, as no later start repeats them."""
        for curve in self._curves.values():
            curve.sync()

    def record_step(self, loss: float | None, grad_norm: float, taken: bool, rate: float, waited: float) -> None:
        """Add a step, with its learning rate and wait for data; `loss` is None without targets."""
        self._totals.add(loss, grad_norm, taken)
        self._steps += 1
        self._rate = rate
        self._waited += waited
        self._timers.collect()
        self._first_ended = self._first_ended or time.perf_counter()
        self._later += 1
        if self._meter is not None:
            self._meter.advance(note="" if loss is None else f"loss {loss:.4f}")

    def report(self, iteration: int, consumed_samples: int, loss_scale: float) -> None:
        """Write log lines and a row of train.csv on the steps since the last report (collective).

        Loss and counts cover all of them, times only the steps of this start.
        """
        count = self._steps
        parts = self._timers.take()  # durations for the device
        seconds = (time.perf_counter() - self._started) / count
        durations = [*(parts.get(part, 0.0) / count for part in PARTS), self._waited / count]
        of_ranks = all_gather((durations, memory(self._world.device)))
        if self.on_rank0:
            *slowest, waited = map(max, zip(*(durations for durations, _ in of_ranks), strict=True))
            rank, used = max(enumerate(used for _, used in of_ranks), key=lambda one: list(one[1].values())[-1])
            row = self._row(iteration, consumed_samples, loss_scale, seconds, waited, list(used.values())[-1])
            if self._may_write():
                self._curves["train"].append(row)
            left = self.seconds_left(iteration)
            self.say(log_line(row, self._train.iterations, self._train.global_batch_size, left))
            times = {part: value * 1000 for part, value in zip(PARTS, slowest, strict=True) if value}
            self.say(figures_line("time (ms)", {**times, "batch generator": waited * 1000}, 2))
            if not self._memory_reported:
                self._memory_reported = True
                self.say(figures_line(f"[Rank {rank}] (after {iteration} iterations) memory (MB)", used, 1))
            self._show(iteration, train=row, time=times)
        self._reset()

    def _row(
        self, iteration: int, consumed_samples: int, loss_scale: float, seconds: float, waited: float, memory_mb: float
    ) -> dict[str, Any]:
        """A row of TRAIN_COLUMNS; `seconds` and `waited` are per iteration."""
        tokens_per_second = self._train.global_batch_size * self._seq_len / seconds
        tflops = self._flops * tokens_per_second / self._world.size / 1e12
        return {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "consumed_tokens": consumed_samples * self._seq_len,
            "learning_rate": self._rate,
            "adamw_learning_rate": self._rate * self._adamw if self._adamw != 1 else None,
            "lm_loss": self._totals.loss,
            "grad_norm": self._totals.grad_norm,
            "ms_per_iteration": round(seconds * 1000, 3),
            "tokens_per_second": round(tokens_per_second, 1),
            "data_wait_ms": round(waited * 1000, 3),
            "loss_scale": loss_scale,
            "skipped": self._totals.skipped,
            "non_finite": self._totals.non_finite,
            "tflops": float(f"{tflops:.5g}"),
            "mfu": round(tflops / self._peak, 5) if self._peak else None,
            "memory_mb": round(memory_mb, 1),
        }

    def seconds_left(self, iteration: int) -> float | None:
        """Seconds to the last iteration, at the mean pace since this start's first step.

        None after that step, which may have compiled the model.
        """
        if not self._later:
            return None
        return (time.perf_counter() - self._first_ended) / self._later * (self._train.iterations - iteration)

    def report_validation(self, iteration: int, consumed_samples: int, loss: float, part: str = "valid") -> None:
        """Write a line and a row of valid.csv; for another part, MODEL_FOLDER/<part>.json."""
        if not self.on_rank0:
            return
        row: dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        if not self._may_write():
            pass
        elif part in self._curves:
            self._curves[part].append(row)
        else:
            write_json(self.folder / f"{part}.json", row)
        name = "validation" if part == "valid" else part
        figures = f"lm loss: {loss:.6E} | perplexity: {row['perplexity']:.6g}"
        self.say(f"{name} at iteration {iteration} | {figures}")
        self._show(iteration, **{part: row})

    def _show(self, iteration: int, **parts: Mapping[str, Any]) -> None:
        """Send the finite figures of an iteration to the boards."""
        figures = {
            f"{part}/{name}": value
            for part, row in parts.items()
            for name, value in row.items()
            if name != "iteration" and value is not None and math.isfinite(value)
        }
        for board in list(self._boards) if self._may_write() else ():
            try:
                board.show(figures, iteration)
            except OSError as error:  # the CSV files have all figures
                self._boards.remove(board)
                with suppress(OSError):
                    board.close(False)
                where = error.filename or f"{self.folder}/{type(board).__name__.lower()}"
                warn(f"{where}: {error.strerror or error}; {type(board).__name__} shows no more")

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.on_rank0:
            say(text)
