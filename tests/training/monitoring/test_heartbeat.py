"""A job that hangs reports where every process is."""

import json
import time
from pathlib import Path

import pytest

from tests.training.helpers import Job, make_run, wait_for
from training.monitoring.heartbeat import Heartbeat, describe, read_heartbeats


def test_a_job_that_never_hangs_leaves_no_files(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 3, 30, "a") as heartbeat:
        heartbeat.beat(7, "step")
        (life,) = read_heartbeats(tmp_path / "heartbeat/a")
        assert life["rank"] == 3
    assert list(tmp_path.iterdir()) == []


def test_silence_writes_the_stacks_and_a_line_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Heartbeat(tmp_path, 0, 0.2, "a") as heartbeat:
        heartbeat.beat(7, "save")
        time.sleep(1.1)
    stacks = (tmp_path / "heartbeat/a/rank_00000.stacks").read_text()
    assert "test_silence_writes_the_stacks" in stacks
    told = capsys.readouterr().err
    assert told.count("nothing has happened for 0.2 s: 1 of 1 ranks at iteration 7 (save)") == 1


def test_regular_beats_and_a_silence_of_zero_dump_nothing(tmp_path: Path) -> None:
    with Heartbeat(tmp_path / "beats", 0, 2, "a") as heartbeat:
        for iteration in range(23):
            heartbeat.beat(iteration, "step")
            time.sleep(0.1)
    with Heartbeat(tmp_path / "zero", 0, 0, "a"):
        time.sleep(0.3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ranks_that_are_elsewhere_or_silent_are_named() -> None:
    lives = [
        {
            "rank": rank,
            "host": "n1",
            "pid": 100 + rank,
            "iteration": 41 if rank == 2 else 42,
            "doing": "step",
            "time": 50.0,
        }
        for rank in range(5)
    ]
    lives[4]["time"] = 10.0
    assert describe(lives, fresh=40.0) == (
        "3 of 5 ranks at iteration 42 (step), rank 2 (process 102 on n1) at iteration 41 (step), "
        "rank 4 (process 104 on n1) gives no sign of life since iteration 42 (step)"
    )


def test_a_stalled_rank_is_named_and_every_rank_shows_its_stacks(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2}, train={"iterations": 50}, watch={"silence_seconds": 1})
    with Job(2, "tests.training.staller", "--config", config, "--model", "tiny") as job:
        job.wait_until_said("at iteration 3 (data)", "err")
        (folder,) = (tmp_path / "models/tiny/heartbeat").iterdir()
        wait_for(lambda: all((folder / f"rank_0000{rank}.stacks").stat().st_size for rank in range(2)))
        said = job.said(0, "err")
        pid = json.loads((folder / "rank_00001.json").read_text())["pid"]
    assert f"rank 1 (process {pid} on " in said
    assert "rank_1_hangs_here" in (folder / "rank_00001.stacks").read_text()
    assert "train_step" in (folder / "rank_00000.stacks").read_text()
