"""Two jobs in one model folder: the later one ends as if it were alone, the earlier one writes nothing more."""

import signal
from pathlib import Path

import pytest

from common.errors import LOCK_LOST
from common.files import read_json, read_rows
from tests.helpers import wait_for
from tests.training.helpers import Job, course, launch_ok, make_run

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}


@pytest.mark.slow
def test_the_newer_job_finishes_and_the_older_one_leaves(tmp_path: Path) -> None:
    ranks = 2
    train = {"iterations": 60, "save_interval": 10, "keep_last": 1, "log_interval": 7, "eval_interval": 30}
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
    assert [row["iteration"] for row in read_rows(folder / "train.csv")] == [*map(str, range(7, 60, 7)), "60"]
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in undisturbed.iterdir()}
