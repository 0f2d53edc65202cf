"""CSV curves survive kills, resumes and new columns; log lines can be parsed."""

from pathlib import Path
from typing import Any

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
