"""TensorBoard's curves do not overlap after a resume; Weights & Biases is tested with a fake package."""

import shutil
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.files import read_rows
from tests.training.helpers import Capsys, Patch, make_run, settings_of, train_tiny
from training.metrics.boards import WeightsAndBiases


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
    assert [event.step for event in events.Scalars("time/forward")] == [1, 2, 3, 4, 5, 6]
    assert "train/mfu" not in events.Tags()["scalars"]  # a CPU has no known peak


def test_tensorboard_is_optional(tmp_path: Path, monkeypatch: Patch, capsys: Any) -> None:
    config = make_run(tmp_path, train={"iterations": 1})
    assert train_tiny(config, "log.tensorboard=false") == 0
    assert not (tmp_path / "models/tiny/tensorboard").exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    assert train_tiny(config, "train.iterations=2") == 0
    assert "warning: no TensorBoard" in capsys.readouterr().err


@pytest.fixture
def service(monkeypatch: Patch) -> Mock:
    """A fake of the package `wandb`."""
    service = Mock(Error=type("Error", (Exception,), {}), __spec__=ModuleSpec("wandb", None))
    service.init.return_value = service
    monkeypatch.setitem(sys.modules, "wandb", service)
    return service


def test_a_resumed_run_continues_its_run_in_weights_and_biases(tmp_path: Path, service: Mock) -> None:
    config = make_run(tmp_path, train={"iterations": 2})
    assert train_tiny(config, "log.wandb=toys") == 0
    assert train_tiny(config, "log.wandb=toys", "train.iterations=3") == 0
    first, second = (call.kwargs for call in service.init.call_args_list)
    assert first["id"] == second["id"] == (tmp_path / "models/tiny/wandb.id").read_text().strip()
    assert (first["project"], first["name"], first["resume"]) == ("toys", "tiny", "allow")
    losses = [float(row["lm_loss"]) for row in read_rows(tmp_path / "models/tiny/train.csv")]
    entries = [call.args[0] for call in service.log.call_args_list]
    shown = [(entry["iteration"], entry["train/lm_loss"]) for entry in entries if "train/lm_loss" in entry]
    assert shown == list(zip([1, 2, 3], losses, strict=True))
    WeightsAndBiases(tmp_path, settings_of(config).experiment("tiny"), "tiny").close(success=False)
    assert [call.kwargs["exit_code"] for call in service.finish.call_args_list] == [0, 0, 1]


def test_a_missing_login_or_package_stops_before_training(
    tmp_path: Path, service: Mock, monkeypatch: Patch, capsys: Capsys
) -> None:
    config = make_run(tmp_path, train={"iterations": 1})
    service.init.side_effect = service.Error("No API key\nconfigured.")
    assert train_tiny(config, "log.wandb=toys") == 2
    assert "models.tiny.log.wandb: No API key configured." in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    assert train_tiny(config, "log.wandb=toys") == 2
    assert "models.tiny.log.wandb" in capsys.readouterr().err
    assert not list((tmp_path / "models/tiny").glob("iter_*"))
