"""CSV files of a run's curves, sums over the steps of a row, and the lines of the log."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import InputError
from common.files import is_torn, naming, read_rows, write_text
from training.planning.speed import CONVENTION

TRAIN_COLUMNS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "learning_rate",
    "lm_loss",  # mean over the steps taken since the previous row, including those before a resume; empty if none was
    "grad_norm",  # of the last of these steps, before clipping
    "ms_per_iteration",  # this and what follows from it: steps of this start since the previous row
    "tokens_per_second",
    "data_wait_ms",  # per iteration, on the rank that waited longest
    "loss_scale",  # of the next step
    "skipped",  # steps since the previous row that were not taken
    "non_finite",  # steps since the previous row with a NaN or infinite loss or gradient
    "tflops",  # per device, see training.planning.speed
    "mfu",  # share of the device's peak; empty if the peak is not known
    "memory_mb",  # peak so far, in 2^20 bytes, of the fullest rank: reserved on a GPU, resident on a CPU
    "adamw_learning_rate",  # of the parameters that are not Muon's, if train.adamw_lr sets another one
)
VALID_COLUMNS = ("iteration", "consumed_samples", "loss", "perplexity")
START_COLUMNS = (  # of each start
    "iteration",  # that it resumes from
    "time",  # Unix seconds
    "processes",
    "consumed_samples",  # before it: with `iteration`, the step that read a sample is known even if batch sizes change
    "nodes",
)


class Curve:
    """A CSV file that gets rows one by one; opened at `iteration`, it drops all later rows.

    A resumed run writes those again. Raises InputError for a file of another kind.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], iteration: int) -> None:
        self.path, self.columns = path, columns
        if path.is_file() and not is_torn(path.read_bytes(), f"{columns[0]},".encode()):
            raise InputError(f"{path}: its first column is not {columns[0]}; repair the file, or move it away")
        kept = [row for row in read_rows(path) if float(row.get(columns[0]) or "inf") <= iteration]
        write_text(path, "".join([",".join(columns) + "\n", *map(self._line, kept)]))

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row; the file is complete when this returns."""
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(row))

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        with naming(self.path), self.path.open("a") as file:
            os.fsync(file.fileno())

    def _line(self, row: Mapping[str, Any]) -> str:
        values = [row.get(column) for column in self.columns]  # NaN: no step was taken
        return ",".join("" if value is None or value != value else str(value) for value in values) + "\n"


def log_line(row: Mapping[str, Any], iterations: int, global_batch_size: int, seconds_left: float | None) -> str:
    """A row of train.csv as a log line in Megatron-LM's format: `key: number | key: number`."""
    seconds, left = row["ms_per_iteration"] / 1000, math.ceil(seconds_left or 0)
    fields = {
        "consumed samples": f"{row['consumed_samples']:12d}",
        "consumed tokens": f"{row['consumed_tokens']:12d}",
        "elapsed time per iteration (ms)": f"{row['ms_per_iteration']:.1f}",
        "learning rate": f"{row['learning_rate']:.3E}",
        "AdamW learning rate": f"{rate:.3E}" if (rate := row["adamw_learning_rate"]) is not None else None,
        "global batch size": f"{global_batch_size:5d}",
        "lm loss": None if math.isnan(row["lm_loss"]) else f"{row['lm_loss']:.6E}",
        "loss scale": f"{row['loss_scale']:.1f}",
        "grad norm": None if math.isnan(row["grad_norm"]) else f"{row['grad_norm']:.3f}",
        "number of skipped iterations": f"{row['skipped']:3d}",
        "number of nan iterations": f"{row['non_finite']:3d}",
        "samples per second": f"{global_batch_size / seconds:.3f}",
        "tokens per second": f"{row['tokens_per_second']:.0f}",
        "TFLOPs": f"{row['tflops']:.4g}",
        f"MFU (%, {CONVENTION})": None if row["mfu"] is None else f"{row['mfu']:.2%}"[:-1],
        "data wait (ms)": f"{row['data_wait_ms']:.1f}",
        "data wait (%)": f"{100 * row['data_wait_ms'] / row['ms_per_iteration']:.1f}",
        "ETA": None if seconds_left is None else f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}",
    }
    known = [f"{key}: {value}" for key, value in fields.items() if value is not None]
    return " | ".join([f"iteration {row['iteration']:8d}/{iterations:8d}", *known])


def figures_line(head: str, figures: Mapping[str, float], digits: int) -> str:
    """`time (ms) | forward: 1.23 | backward: 2.34`."""
    return " | ".join([head, *(f"{name}: {value:.{digits}f}" for name, value in figures.items())])


@dataclass
class StepTotals:
    """The steps since the last row; saved with a checkpoint, so that a resume changes no row."""

    losses: list[float] = field(default_factory=list)  # taken steps; partial sums would round differently
    grad_norm: float = math.nan  # of the last step that was taken, or of the last step if none was
    skipped: int = 0  # steps that were not taken
    non_finite: int = 0  # steps whose loss or gradient was NaN or infinite

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "StepTotals":
        """The totals that `state` was called on."""
        return cls(**{**state, "grad_norm": float(state["grad_norm"])}) if state else cls()

    @property
    def loss(self) -> float:
        """Mean over the steps that were taken; NaN if none was."""
        return fmean(self.losses) if self.losses else math.nan

    def add(self, loss: float | None, grad_norm: float, taken: bool) -> None:
        """Add one step; without targets (None) it only counts as not taken."""
        if loss is None:
            self.skipped += 1
            return
        counts = taken and math.isfinite(loss)
        if counts or not self.losses:
            self.grad_norm = grad_norm
        if counts:
            self.losses.append(loss)
        self.skipped += not taken
        self.non_finite += not (math.isfinite(loss) and math.isfinite(grad_norm))

    def state(self) -> dict[str, Any]:
        """The totals for `restored` as JSON, which has no NaN; empty if there was no step."""
        if not self.losses and not self.skipped and not self.non_finite:
            return {}
        return {**asdict(self), "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else str(self.grad_norm)}
