"""The curves of a run as CSV files, and its log line."""

import csv
import io
from pathlib import Path
from typing import Any

from common.files import read_rows, write_text

TRAIN_COLUMNS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "learning_rate",
    "lm_loss",
    "grad_norm",
    "ms_per_iteration",
    "tokens_per_second",
    "data_wait_ms",
)
VALID_COLUMNS = ("iteration", "consumed_samples", "loss", "perplexity")


class Curve:
    """One CSV file that grows by a row; opened at `iteration`, it forgets what a resumed run will do again."""

    def __init__(self, path: Path, columns: tuple[str, ...], iteration: int) -> None:
        self.path, self.columns = path, columns
        kept = [row for row in read_rows(path) if int(row["iteration"]) <= iteration]
        write_text(path, "".join([self._line(columns), *(self._line(tuple(row.values())) for row in kept)]))

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; the file is whole again when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(tuple(row[column] for column in self.columns)))

    @staticmethod
    def _line(values: tuple[Any, ...]) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(values)
        return line.getvalue()


def log_line(row: dict[str, Any], iterations: int, global_batch_size: int) -> str:
    """The line that Megatron's users know, from a row of the training curve."""
    return (
        f"iteration {row['iteration']:8d}/{iterations:8d}"
        f" | consumed samples: {row['consumed_samples']:12d}"
        f" | consumed tokens: {row['consumed_tokens']:12d}"
        f" | elapsed time per iteration (ms): {row['ms_per_iteration']:.1f}"
        f" | learning rate: {row['learning_rate']:.3E}"
        f" | global batch size: {global_batch_size:5d}"
        f" | lm loss: {row['lm_loss']:.6E}"
        f" | grad norm: {row['grad_norm']:.3f}"
        f" | tokens per second: {row['tokens_per_second']:.0f}"
        f" | data wait (ms): {row['data_wait_ms']:.1f}"
    )
