"""The table of predicted and published steps."""

import pytest

from benchmarks.planning import RUNS, main, predict, summary


def test_the_table_has_a_row_per_run_and_the_errors_of_both_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts"]) == 0
    output = capsys.readouterr().out
    assert output.count("| held out") == 20
    assert output.count("| calibration") == 4
    assert output.count("matrix products") == len(RUNS)


def test_both_sets_are_within_their_mean_errors() -> None:
    calibration, held_out = summary([predict(run) for run in RUNS]).splitlines()
    assert calibration.startswith("calibration: 4 runs, mean error 7 %")
    assert held_out.startswith("held out: 20 runs, mean error 7 %")
