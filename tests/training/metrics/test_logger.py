"""Reports: means over the steps taken, memory once, the slowest parts; curves survive kills."""

from math import inf, nan
from pathlib import Path
from typing import Any

import orjson
import pytest

from common.files import read_rows
from tests.training.helpers import Capsys, Patch, Session, make_session
from training.checkpoint import Progress
from training.metrics import logger
from training.metrics.curves import VALID_COLUMNS, Curve
from training.metrics.device import PARTS
from training.metrics.logger import MetricsLogger


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return make_session(tmp_path, train={"iterations": 100}, log={"peak_tflops": 1e-3})


def logger_of(session: Session, folder: Path, iteration: int = 0, state: dict[str, Any] | None = None) -> MetricsLogger:
    folder.mkdir(exist_ok=True)
    progress = Progress(iteration, 0, journal=state or {})
    return MetricsLogger(folder, session, progress=progress)


def test_a_report_covers_the_steps_that_were_taken_and_shows_the_slowest_and_fullest_rank(
    session: Session, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    another = ([0.0] * len(PARTS) + [0.0625], {"resident": 1.0, "max resident": 1e6})  # seconds, MB
    monkeypatch.setattr(logger, "all_gather", lambda mine: [mine, another])
    # the fourth is a spike that was left out
    steps = [(4.0, 1.5, True), (nan, nan, False), (2.0, 0.5, True), (9.0, 7.0, False), (3.0, inf, False)]
    steps += [(None, 0.0, False)]  # without targets
    with logger_of(session, tmp_path / "run") as log:
        for step in steps:
            with session.timers("forward-backward"):
                pass
            log.record_step(*step, 1e-3, 0.25)
        log.report(6, 48, 1.0)
        log.record_step(inf, inf, False, 1e-3, 0.0)
        log.report(7, 56, 1.0)
    first, second = read_rows(tmp_path / "run" / "train.csv")
    assert (first["lm_loss"], first["grad_norm"], first["skipped"], first["non_finite"]) == ("3.0", "0.5", "4", "2")
    assert (second["lm_loss"], second["skipped"], second["non_finite"]) == ("", "1", "1")
    assert [float(row["data_wait_ms"]) for row in (first, second)] == [250, 62.5]
    assert float(first["memory_mb"]) == 1e6
    # parameters without positions, 2 layers of width 32 over 16 tokens
    per_token = 6 * (34208 - 16 * 32) + 12 * 2 * 32 * 16
    assert float(first["tflops"]) == pytest.approx(per_token * float(first["tokens_per_second"]) / 1e12, rel=1e-3)
    assert float(first["mfu"]) == pytest.approx(float(first["tflops"]) / 1e-3, rel=1e-3)
    device, arithmetic, line, times, memory, later, last = capsys.readouterr().out.splitlines()
    assert device.startswith("device") and arithmetic.startswith("arithmetic")
    assert line.startswith("iteration        6/") and later.startswith("iteration        7/")
    assert times.startswith("time (ms) | forward-backward: 0.0") and times.endswith("| batch generator: 250.00")
    assert "forward:" not in times  # what was not timed, as with a pipeline, is not there
    assert memory.startswith("[Rank 1] (after 6 iterations) memory (MB) | resident: ")  # the first time only
    assert last.startswith("time (ms)")


def test_the_learning_rate_of_adamw_is_shown_beside_muons(tmp_path: Path, capsys: Capsys) -> None:
    session = make_session(tmp_path, train={"iterations": 9, "optimizer": "muon", "lr": 0.02, "adamw_lr": 0.005})
    with logger_of(session, tmp_path / "run") as log:
        log.record_step(4.0, 1.0, True, 0.01, 0.0)
        log.report(1, 8, 1.0)
    (row,) = read_rows(tmp_path / "run" / "train.csv")
    assert (row["learning_rate"], row["adamw_learning_rate"]) == ("0.01", "0.0025")
    assert "| learning rate: 1.000E-02 | AdamW learning rate: 2.500E-03 |" in capsys.readouterr().out


def test_the_first_row_after_a_resume_includes_the_steps_before_it(session: Session, tmp_path: Path) -> None:
    steps = [(4.1, 1.5, True), (nan, inf, False), (2.3, 0.5, True), (7.7, 9.0, False)]
    rows = []
    for cut in (0, 1, 2, 4):
        folder = tmp_path / f"run {cut}"
        with logger_of(session, folder) as log:
            for step in steps[:cut]:
                log.record_step(*step, 1e-3, 0.0)
            kept = log.state()
            state = orjson.loads(orjson.dumps(kept))  # as a manifest holds it
            log.record_step(9.0, 1.0, True, 1e-3, 0.0)
            assert orjson.loads(orjson.dumps(kept)) == state  # train.async_save: training continues
        with logger_of(session, folder, cut, state) as log:
            for step in [*steps[cut:], (1.9, 0.25, True)]:
                log.record_step(*step, 1e-3, 0.0)
            log.report(6, 48, 1.0)
            assert log.state() == {}
        (row,) = read_rows(folder / "train.csv")
        rows.append([row[column] for column in ("lm_loss", "grad_norm", "skipped", "non_finite")])
    assert rows == [rows[0]] * 4 and rows[0][1:] == ["0.25", "2", "1"]


def test_the_time_left_is_at_the_pace_since_the_first_step_which_may_have_compiled(
    session: Session, tmp_path: Path, monkeypatch: Patch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("training.metrics.logger.time.perf_counter", lambda: clock[0])
    with logger_of(session, tmp_path / "run", iteration=20) as log:
        for step, (clock[0], left) in enumerate([(100.0, None), (102.0, 156.0), (106.0, 231.0)], 21):
            log.record_step(1.0, 1.0, True, 1e-3, 0.0)
            assert log.seconds_left(step) == left


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
