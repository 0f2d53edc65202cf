"""Weights & Biases: the starts of a model are runs of one group, whose steps are iterations."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.settings import LogSettings
from tests.conftest import ROOT
from tests.training.helpers import Patch, make_run
from training.metrics.boards import open_boards

FOLDER = os.environ.get("WANDB_FOLDER", "")
"""Where wandb is, if it was installed by itself (pip install --target FOLDER wandb)."""


class Run:
    """A stand-in of a W&B run: its options, and what was logged as (figures, step)."""

    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.exit_code = options, list[tuple[dict[str, float], int]](), -1

    def log(self, figures: dict[str, float], step: int) -> None:
        assert not self.rows or step >= self.rows[-1][1], "W&B drops what has a smaller step than the last one"
        self.rows.append((figures, step))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_each_start_is_a_run_of_the_models_group_with_iterations_as_steps(tmp_path: Path, monkeypatch: Patch) -> None:
    """The third start repeats the second's iterations: a run of its own overwrites nothing."""
    runs: list[Run] = []

    def init(**options: Any) -> Run:
        runs.append(Run(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    for name, start, end in (("m", 0, 8), ("m", 8, 16), ("m", 8, 12), ("other", 0, 8)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = LogSettings(tensorboard=False, wandb="project")
        (board,) = open_boards(log, name, folder, start, {"lr": 1.0}, on_rank0=True)
        for iteration in range(start + 4, end + 1, 4):
            board.show({"train/lm_loss": 2.0}, iteration)
            board.show({"valid/loss": 3.0}, iteration)
        board.close(success=iteration > 8)
    assert [[step for _, step in run.rows] for run in runs] == [[4, 4, 8, 8], [12, 12, 16, 16], [12, 12], [4, 4, 8, 8]]
    assert [run.options["name"] for run in runs] == ["m from 0", "m from 8", "m from 8", "other from 0"]
    first, *others, foreign = (run.options["group"] for run in runs)
    assert others == [first] * 2 and foreign != first, "another model is another group"
    assert not any({"id", "resume"} & run.options.keys() for run in runs), "W&B gives each start an id of its own"
    assert [run.exit_code for run in runs] == [1, 0, 0, 1] and runs[0].options["config"] == {"lr": 1.0}


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: leveldb's log after a head of 7 bytes."""
    data, at, joined = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or (length, kind) == (0, 0):
            at += left
            continue
        joined += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield joined
            joined = b""


def shown(path: Path) -> tuple[Any, dict[int, set[str]]]:
    """W&B's description of the run in a file, and the names of the figures of each step."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found, unused-ignore]

    run, steps = None, dict[int, set[str]]()
    for record in records(path):
        read = wandb_internal_pb2.Record.FromString(record)
        if read.WhichOneof("record_type") == "run":
            run = read.run
        elif read.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in read.history.item}
            assert items["_step"] == read.history.step.num not in steps
            steps[items["_step"]] = {name for name in items if "/" in name}
    return run, steps


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER or find_spec("wandb")), reason="pip install --target FOLDER wandb, WANDB_FOLDER=FOLDER")
def test_the_offline_files_of_two_starts_are_two_runs_of_one_group_with_the_whole_curve(tmp_path: Path) -> None:
    code = "import sys; sys.path.append(sys.argv.pop(1)); from training.train import main; sys.exit(main(sys.argv[1:]))"
    every = {"log_interval": 4, "eval_interval": 4, "save_interval": 8, "iterations": 16}
    config = make_run(tmp_path, log={"wandb": "project", "tensorboard": False}, train=every)
    for last in (8, 16):
        command = [
            sys.executable,
            "-c",
            code,
            FOLDER,
            "--config",
            config,
            "--model",
            "tiny",
            f"train.iterations={last}",
        ]
        environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
        subprocess.run(list(map(str, command)), env=environment, check=True, timeout=300, capture_output=True)
    sys.path.append(FOLDER)
    try:
        found = [shown(path) for path in sorted((tmp_path / "models/tiny/wandb").glob("offline-run-*/*.wandb"))]
    finally:
        sys.path.remove(FOLDER)
    (first, early), (second, late) = found
    assert sorted(early) == [*range(1, 9)] and sorted(late) == [*range(9, 17)]
    for iteration, names in {**early, **late}.items():
        assert ({"train/lm_loss"} if iteration % 4 else {"train/lm_loss", "valid/loss"}) <= names
    assert first.run_id != second.run_id and first.run_group == second.run_group != ""
    assert (first.display_name, second.display_name) == ("tiny from 0", "tiny from 8")
