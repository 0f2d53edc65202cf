"""A run that is asked to stop saves and exits with its own code; a killed one loses little."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import LOCK_LOST, RESUME_ME
from common.files import read_json, read_rows
from tests.helpers import wait_for
from tests.training.helpers import TINY, Capsys, Job, Patch, copy_run, course, launch_ok, make_run, train_tiny
from training.model_folder import stopped_mark
from training.monitoring.run_lock import RunLock
from training.monitoring.stop import SIGNALS

LONG = {"iterations": 100_000, "save_interval": 100_000, "eval_interval": 100_000}


def interrupted(config: Path, interrupt: Callable[[], object]) -> int:
    """The exit code of a run in this process that is interrupted after its second iteration."""
    curve = config.parent / "models/tiny/train.csv"

    def watch() -> None:
        wait_for(lambda: curve.exists() and len(read_rows(curve)) >= 2)
        interrupt()

    thread = threading.Thread(target=watch)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    thread.start()
    try:
        return train_tiny(config)
    finally:
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("way", ["SIGTERM", "SIGUSR2", "SIGINT", "SIGHUP", "stop"])
def test_a_run_that_is_asked_to_stop_saves_and_exits_to_be_resumed(tmp_path: Path, way: str, capsys: Capsys) -> None:
    config, folder = make_run(tmp_path, train=LONG), tmp_path / "models/tiny"
    ways = {"stop": lambda: (folder / "stop").touch()}
    assert interrupted(config, ways.get(way, lambda: os.kill(os.getpid(), signal.Signals[way]))) == RESUME_ME
    said = capsys.readouterr().out.splitlines()[-1]
    (saved,) = folder.glob("iter_*")
    iteration = int(saved.name.removeprefix("iter_"))
    assert iteration == int(read_rows(folder / "train.csv")[-1]["iteration"])
    assert way in said and f"stopped after iteration {iteration}" in said
    assert not {"stop", "done.json", "owner.json", "heartbeat"} & {path.name for path in folder.iterdir()}
    assert stopped_mark(folder).exists() == (way == "stop")  # a person asked, so that nobody starts it again unasked
    assert train_tiny(config, f"train.iterations={iteration + 1}") == 0
    assert f"resumed from {saved}" in capsys.readouterr().out
    assert not stopped_mark(folder).exists()


def test_a_second_interrupt_ends_the_process_at_once_and_an_ignored_signal_does_not(tmp_path: Path) -> None:
    config, curve = make_run(tmp_path, train=LONG), tmp_path / "models/tiny/train.csv"
    with Job(1, "tests.training.failing", "--config", config, "--model", "tiny", "nohup") as job:
        job.wait_until_said("stalls")  # in a step that never ends
        job.signal(signal.SIGHUP)
        job.signal(signal.SIGINT)
        job.wait_until_said("asked: SIGINT")
        job.signal(signal.SIGINT)
        (ended,) = job.wait()
    assert ended.returncode == 130 and ended.stderr.count("\n") == 1
    assert curve.exists() and not list(curve.parent.glob("iter_*"))


def test_a_job_whose_folder_was_taken_over_ends_without_saving(
    tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setattr("training.monitoring.run_lock._INTERVAL", 0.01)
    config, folder = make_run(tmp_path, train=LONG), tmp_path / "models/tiny"
    assert interrupted(config, RunLock(folder, 0, "slurm-77.0-1").take) == LOCK_LOST
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "job slurm-77.0-1 (process " in error
    assert not list(folder.glob("iter_*"))
    assert read_json(folder / "owner.json")["job"] == "slurm-77.0-1"  # the other's claim stands


def test_two_ranks_killed_once_and_stopped_once_end_like_a_run_never_stopped(tiny_run: Path, tmp_path: Path) -> None:
    config, folder, straight = copy_run(tiny_run, tmp_path), tmp_path / "models/tiny", tiny_run / "models/tiny"
    shutil.rmtree(folder)
    command = ("training.train", "--config", config, "--model", "tiny", "train.save_interval=5")
    with Job(2, *command) as job:
        job.wait_until_said("lm loss", times=7)
        job.signal(signal.SIGKILL)
        assert {result.returncode for result in job.wait()} == {-signal.SIGKILL}
    assert not (folder / "done.json").exists()
    with Job(2, *command) as job:
        job.wait_until_said("lm loss", times=2)  # both ranks listen by now
        job.signal(signal.SIGTERM, 1)  # one of them alone: the other hears of it
        ended = job.wait()
    assert [result.returncode for result in ended] == [RESUME_ME, RESUME_ME], ended
    assert "resumed from" in ended[0].stdout and "SIGTERM" in ended[0].stdout
    launch_ok(2, *command)
    assert course(folder) == course(straight)
    assert (folder / "valid.csv").read_text() == (straight / "valid.csv").read_text()
    assert read_json(folder / "done.json") == read_json(straight / "done.json")


@pytest.mark.slow
def test_the_newer_job_finishes_and_the_older_one_leaves(tmp_path: Path) -> None:
    """The newer one ends as if it were alone."""
    ranks = 2
    train = {"iterations": 75, "save_interval": 10, "keep_last": 1, "log_interval": 7, "eval_interval": 30}
    train |= {"lr_decay": "constant", "warmup_iterations": 1}  # whatever the number of iterations
    sections = {"model": TINY, "parallel": {"data": ranks}, "train": train}
    config, folder = make_run(tmp_path / "contested", **sections), tmp_path / "contested/models/tiny"
    command = ("training.train", "--config", config, "--model", "tiny")
    with Job(ranks, *command, "train.iterations=1000000") as older:
        wait_for(lambda: list(folder.glob("iter_*0")))
        older.signal(signal.SIGSTOP)  # a node that Slurm took for dead
        with Job(ranks, *command) as newer:
            newer.wait_until_said("resumed from")
            older.signal(signal.SIGCONT)
            assert [result.returncode for result in older.wait()] == [LOCK_LOST] * ranks
            assert [result.returncode for result in newer.wait()] == [0] * ranks, newer.said(0, "err")
        said = older.said(0, "err")
    assert said.count("\n") == 1
    alone = make_run(tmp_path / "alone", **sections)
    launch_ok(ranks, "training.train", "--config", alone, "--model", "tiny")
    undisturbed = tmp_path / "alone/models/tiny"
    assert read_json(folder / "done.json") == read_json(undisturbed / "done.json")
    assert course(folder) == course(undisturbed)
    assert (folder / "valid.csv").read_text() == (undisturbed / "valid.csv").read_text()
    assert [row["iteration"] for row in read_rows(folder / "train.csv")] == ["1", *map(str, range(7, 75, 7)), "75"]
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in undisturbed.iterdir()}
