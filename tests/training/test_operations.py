"""The choice of operations is made once, recorded, and used again; without a GPU there is none."""

from pathlib import Path
from typing import Any

import torch

from common.files import read_json
from tests.training.helpers import Patch, make_run, settings_of
from training import operations
from training.kernels import library
from training.launch.process_group import World
from training.planning.run import make_plan

GPU = World(0, 1, torch.device("cuda", 0))


def choose(folder: Path, world: World = GPU, **train: Any) -> None:
    experiment = make_plan(settings_of(make_run(folder / "run", train=train)), "tiny").experiment
    operations.choose_operations(experiment, world, folder)


def test_the_fastest_attention_is_recorded_and_used_again(tmp_path: Path, monkeypatch: Patch) -> None:
    """On a GPU of which only the name is known, where a table gives the times."""
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    monkeypatch.setattr(operations, "precision_type", lambda *_: torch.bfloat16)
    monkeypatch.setattr(library, "prepare", lambda report: "")
    monkeypatch.setattr(operations, "use_attention", used.append)
    monkeypatch.setattr(operations, "measure_attention", lambda *_: {"cudnn": 1.0, "flash": 1.5, "math": 9.0})
    (tmp_path / "operations.json").write_text("{")  # damaged: replaced
    choose(tmp_path)
    recorded = read_json(tmp_path / "operations.json")
    assert recorded["attention"] == "cudnn" and recorded["milliseconds"]["flash"] == 1.5
    monkeypatch.setattr(operations, "measure_attention", lambda *_: {"flash": 0.1})
    choose(tmp_path)
    assert used == ["cudnn", "cudnn"]
    choose(tmp_path, micro_batch_size=4, global_batch_size=8)  # other shapes: measured again
    assert used == ["cudnn", "cudnn", "flash"]


def test_a_deterministic_run_chooses_among_kernels_that_repeat() -> None:
    times = {"cudnn": 1.0, "efficient": 1.1, "flash": 1.5, "math": 9.0}
    assert operations.fastest(times) == "cudnn" and operations.fastest(times, deterministic=True) == "flash"
