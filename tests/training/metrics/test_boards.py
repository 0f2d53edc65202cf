"""TensorBoard's curves do not overlap after a resume."""

import shutil
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.files import read_rows
from tests.training.helpers import make_run, train_tiny


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"iterations": 4, "save_interval": 2, "eval_interval": 2})
    folder = tmp_path / "models" / "tiny"
    assert train_tiny(config) == 0
    shutil.rmtree(folder / "iter_0000004")  # as if killed two steps after the previous checkpoint
    time.sleep(1.1)  # event files are ordered by the seconds in their names
    assert train_tiny(config, "train.iterations=6", "train.lr=0.02") == 0
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for tag, path, column in (("train/lm_loss", "train.csv", "lm_loss"), ("valid/loss", "valid.csv", "loss")):
        shown = {event.step: event.value for event in events.Scalars(tag)}
        assert len(shown) == len(events.Scalars(tag))  # no iteration occurs twice
        assert shown == pytest.approx({int(row["iteration"]): float(row[column]) for row in read_rows(folder / path)})
