"""CSV curves survive kills, resumes and new columns; log lines can be parsed."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.files import read_rows
from training.metrics.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, figures_line, log_line

ROW: dict[str, Any] = {
    "iteration": 100,
    "consumed_samples": 800,
    "consumed_tokens": 819200,
    "learning_rate": 1.5e-4,
    "lm_loss": 6.25,
    "grad_norm": 1.0,
    "ms_per_iteration": 512.0,
    "tokens_per_second": 16000.0,
    "data_wait_ms": 2.56,
    "loss_scale": 65536.0,
    "skipped": 3,
    "non_finite": 2,
    "tflops": 38.8,
    "mfu": 0.03923,
    "memory_mb": 7000.0,
}


def row(iteration: int) -> dict[str, float]:
    return {"iteration": iteration, "consumed_samples": iteration * 8, "loss": 1 / iteration, "perplexity": 2.0}


def test_a_resumed_run_drops_the_rows_it_will_repeat(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    curve = Curve(path, VALID_COLUMNS, 0)
    for iteration in (10, 20, 30):
        curve.append(row(iteration))
    Curve(path, VALID_COLUMNS, 20).append(row(25))
    assert [entry["iteration"] for entry in read_rows(path)] == ["10", "20", "25"]
    assert float(read_rows(path)[1]["loss"]) == 1 / 20  # written with every digit


def test_a_row_truncated_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    Curve(path, VALID_COLUMNS, 0).append(row(10))
    path.write_text(path.read_text() + "20,16")
    assert [entry["iteration"] for entry in read_rows(path)] == ["10"]
    Curve(path, VALID_COLUMNS, 10).append(row(20))
    assert [entry["iteration"] for entry in read_rows(path)] == ["10", "20"]


def test_a_file_with_other_columns_keeps_every_value_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("lm_loss,iteration,mood\n9.5,50,glad\n8.5,60,calm\n")
    Curve(path, TRAIN_COLUMNS, 50).append(ROW)
    older, newer = read_rows(path)
    assert (older["iteration"], older["lm_loss"], older["mood"], older["mfu"]) == ("50", "9.5", "glad", "")
    assert (newer["iteration"], newer["lm_loss"], newer["mood"], newer["mfu"]) == ("100", "6.25", "", "0.03923")


def test_the_log_line_has_the_fields_of_the_reference_runs_in_order() -> None:
    line = log_line(ROW, 320000, 8, seconds_left=90061.5)
    place, *fields = line.split(" | ")
    assert place == "iteration      100/  320000"
    figures = dict(field.split(": ") for field in fields)
    assert "\n" not in line and figures.pop("ETA") == "25:01:02"
    assert {key: float(value) for key, value in figures.items()} == {
        "consumed samples": 800,
        "consumed tokens": 819200,
        "elapsed time per iteration (ms)": 512,
        "learning rate": 1.5e-4,
        "global batch size": 8,
        "lm loss": 6.25,
        "loss scale": 65536,
        "grad norm": 1,
        "number of skipped iterations": 3,
        "number of nan iterations": 2,
        "samples per second": 15.625,
        "tokens per second": 16000,
        "TFLOPs": 38.8,
        "MFU (%, 6N+12Lhs)": 3.92,
        "data wait (ms)": 2.6,
        "data wait (%)": 0.5,
    }
    assert list(figures)[:7] == [
        "consumed samples",
        "consumed tokens",
        "elapsed time per iteration (ms)",
        "learning rate",
        "global batch size",
        "lm loss",
        "loss scale",
    ]


def test_a_device_without_a_known_peak_has_no_mfu_in_the_log_and_an_empty_cell(tmp_path: Path) -> None:
    unknown = {**ROW, "mfu": None}
    line = log_line(unknown, 320000, 8, seconds_left=0)
    assert "TFLOPs: 38.8" in line and "MFU" not in line
    Curve(tmp_path / "train.csv", TRAIN_COLUMNS, 0).append(unknown)
    assert read_rows(tmp_path / "train.csv")[0]["mfu"] == ""


def test_other_lines_name_each_figure() -> None:
    assert figures_line("time (ms)", {"forward": 1.234, "backward": 2.0}, 1) == (
        "time (ms) | forward: 1.2 | backward: 2.0"
    )


def test_a_curve_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "valid.csv", VALID_COLUMNS, 0)
    curve.path = Path("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        curve.append(row(10))


def test_a_curve_without_iterations_gives_one_line(tmp_path: Path) -> None:
    for text in ("iteration,loss\nten,1\n", "loss\n1\n"):
        (tmp_path / "valid.csv").write_text(text)
        with pytest.raises(InputError, match=r"valid\.csv: a row without an iteration"):
            Curve(tmp_path / "valid.csv", VALID_COLUMNS, 0)
