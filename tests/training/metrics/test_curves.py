"""CSV curves survive kills, resumes and new columns; log lines can be parsed."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.files import read_rows
from training.metrics.curves import TRAIN_COLUMNS, VALID_COLUMNS, Curve, log_line

VALUES = (100, 800, 819200, 1.5e-4, 6.25, 1.0, 512.0, 16000.0, 2.56, 65536.0, 3, 2, 38.8, 0.03923, 7000.0)
ROW: dict[str, Any] = dict(zip(TRAIN_COLUMNS, VALUES, strict=True))


def row(iteration: int) -> dict[str, float]:
    return {"iteration": iteration, "consumed_samples": iteration * 8, "loss": 1 / iteration, "perplexity": 2.0}


def test_a_resumed_run_drops_the_rows_it_will_repeat_and_one_truncated_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    curve = Curve(path, VALID_COLUMNS, 0)
    for iteration in (10, 20, 30):
        curve.append(row(iteration))
    Curve(path, VALID_COLUMNS, 20).append(row(25))
    path.write_text(path.read_text() + "30,16")
    Curve(path, VALID_COLUMNS, 25).append(row(40))
    assert [entry["iteration"] for entry in read_rows(path)] == ["10", "20", "25", "40"]
    assert float(read_rows(path)[2]["loss"]) == 1 / 25  # written with every digit


def test_a_file_with_other_columns_keeps_every_value_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("lm_loss,iteration,mood\n9.5,50,glad\n8.5,60,calm\n")
    Curve(path, TRAIN_COLUMNS, 50).append(ROW)
    older, newer = read_rows(path)
    assert (older["iteration"], older["lm_loss"], older["mood"], older["mfu"]) == ("50", "9.5", "glad", "")
    assert (newer["iteration"], newer["lm_loss"], newer["mood"], newer["mfu"]) == ("100", "6.25", "", "0.03923")


def test_the_log_line_has_the_fields_of_the_reference_runs_in_order() -> None:
    place, *fields = log_line(ROW, 320000, 8, seconds_left=90061.5).split(" | ")
    assert place == "iteration      100/  320000"
    figures = dict(field.split(": ") for field in fields)
    assert figures.pop("ETA") == "25:01:02"
    expected = {
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
    assert [(key, float(value)) for key, value in figures.items()] == [*expected.items()]


def test_a_curve_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    curve = Curve(path, VALID_COLUMNS, 0)
    curve.path = Path("/dev/full")
    with pytest.raises(OSError, match="'/dev/full'"):
        curve.append(row(10))
    for text in ("iteration,loss\nten,1\n", "loss\n1\n"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"valid\.csv"):
            Curve(path, VALID_COLUMNS, 0)
