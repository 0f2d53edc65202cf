"""CSV curves survive kills and resumes."""

from pathlib import Path

from common.files import read_rows
from training.curves import VALID_COLUMNS, Curve, log_line


def row(iteration: int) -> dict[str, float]:
    return {"iteration": iteration, "consumed_samples": iteration * 8, "loss": 1 / iteration, "perplexity": 2.0}


def test_a_resumed_run_forgets_the_rows_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    curve = Curve(path, VALID_COLUMNS, 0)
    for iteration in (10, 20, 30):
        curve.append(row(iteration))
    Curve(path, VALID_COLUMNS, 20).append(row(25))
    assert [entry["iteration"] for entry in read_rows(path)] == ["10", "20", "25"]
    assert float(read_rows(path)[1]["loss"]) == 1 / 20  # written with every digit


def test_a_row_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "valid.csv"
    Curve(path, VALID_COLUMNS, 0).append(row(10))
    path.write_text(path.read_text() + "20,16")
    assert [entry["iteration"] for entry in read_rows(path)] == ["10"]
    Curve(path, VALID_COLUMNS, 10).append(row(20))
    assert [entry["iteration"] for entry in read_rows(path)] == ["10", "20"]


def test_the_log_line_reads_like_the_reference_runs() -> None:
    line = log_line(
        {
            "iteration": 100,
            "consumed_samples": 800,
            "consumed_tokens": 819200,
            "learning_rate": 1.5e-4,
            "lm_loss": 6.25,
            "grad_norm": 1.0,
            "ms_per_iteration": 512.0,
            "tokens_per_second": 16000.0,
            "data_wait_ms": 0.25,
        },
        320000,
        8,
    )
    assert line.startswith(
        "iteration      100/  320000 | consumed samples:          800 | consumed tokens:       819200"
    )
    assert "elapsed time per iteration (ms): 512.0 | learning rate: 1.500E-04 | global batch size:     8" in line
    assert "lm loss: 6.250000E+00 | grad norm: 1.000" in line
    assert line.endswith("tokens per second: 16000 | data wait (ms): 0.2")
