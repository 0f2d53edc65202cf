"""A job that hangs reports where every process is."""

import time
from pathlib import Path

from common.files import read_json
from tests.helpers import wait_for
from tests.training.helpers import Capsys, Job, make_run
from training.monitoring.heartbeat import Heartbeat, describe


def test_silence_writes_the_stacks_and_a_line_once(tmp_path: Path, capsys: Capsys) -> None:
    stacks, told = tmp_path / "heartbeat/a/rank_00000.stacks", ""
    with Heartbeat(tmp_path, 0, 0.2, "a") as heartbeat:
        heartbeat.beat(7, "save")
        while "iteration 7 (save)" not in told:
            time.sleep(0.01)
            told += capsys.readouterr().err
        time.sleep(0.5)  # more than twice the silence
        told += capsys.readouterr().err
    assert told.count("\n") == 1 and "0.2 s: 1 of 1 ranks at iteration 7 (save)" in told
    assert "test_silence_writes_the_stacks" in stacks.read_text()


def test_ranks_that_are_elsewhere_or_silent_are_named() -> None:
    life = {"host": "n1", "doing": "step", "iteration": 42, "time": 50.0}
    lives = [{**life, "rank": rank, "pid": 100 + rank} for rank in range(5)]
    lives[2]["iteration"], lives[3]["time"], lives[4]["time"] = 41, 40.0, 39.9
    assert describe(lives, fresh=40.0) == (
        "3 of 5 ranks at iteration 42 (step), rank 2 (process 102 on n1) at iteration 41 (step), "
        "rank 4 (process 104 on n1) gives no sign of life since iteration 42 (step)"
    )


def test_a_stalled_rank_is_named_and_every_rank_shows_its_stacks(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2}, train={"iterations": 50}, watch={"silence_seconds": 1})
    with Job(2, "tests.training.failing", "--config", config, "--model", "tiny", "hangs") as job:
        job.wait_until_said("at iteration 3 (data)", "err")
        (folder,) = (tmp_path / "models/tiny/heartbeat").iterdir()
        wait_for(lambda: all((folder / f"rank_0000{rank}.stacks").stat().st_size for rank in range(2)))
        said = job.said(0, "err")
        pid = read_json(folder / "rank_00001.json")["pid"]
    assert f"rank 1 (process {pid} on " in said
    assert "rank_1_hangs_here" in (folder / "rank_00001.stacks").read_text()
    assert "train_step" in (folder / "rank_00000.stacks").read_text()
