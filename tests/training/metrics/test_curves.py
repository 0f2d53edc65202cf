"""CSV curves survive kills and resumes."""

from pathlib import Path

from common.files import read_rows
from training.metrics.curves import VALID_COLUMNS, Curve


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
