"""The choice of operations is made once, recorded, and used again; without a GPU there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.files import read_json
from tests.training.helpers import ALONE, Capsys, Patch, make_run, settings_of
from training import attention, operations
from training.attention import fastest
from training.kernels import library
from training.parallel.process_group import World
from training.run_plan import make_plan

GPU = World(0, 1, torch.device("cuda", 0))


@pytest.fixture
def fake_gpu(monkeypatch: Patch) -> list[str]:
    """A GPU of which only the name is known and attention is timed by a table; returns what was put to use."""
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    monkeypatch.setattr(operations, "precision_type", lambda *_: torch.bfloat16)
    monkeypatch.setattr(library, "prepare", lambda report: "")
    monkeypatch.setattr(library, "select", lambda names: used.append(f"kernels {sorted(names)}"))
    monkeypatch.setattr(attention, "use", used.append)
    times = {"cudnn": 1.0, "flash": 1.5, "math": 9.0}
    monkeypatch.setattr(attention, "measure", lambda *given: {key: times[key] for key in given[-1] if key in times})
    return used


def choose(folder: Path, world: World = GPU, **train: Any) -> None:
    experiment = make_plan(settings_of(make_run(folder / "run", train=train)), "tiny").experiment
    operations.choose_operations(experiment, world, folder)


def test_the_fastest_attention_is_recorded_and_used_again(
    tmp_path: Path, fake_gpu: list[str], monkeypatch: Patch
) -> None:
    (tmp_path / "operations.json").write_text("{")  # damaged: replaced
    choose(tmp_path)
    recorded = read_json(tmp_path / "operations.json")
    assert recorded["attention"] == "cudnn" and recorded["milliseconds"]["flash"] == 1.5
    monkeypatch.setattr(attention, "measure", lambda *_: {"flash": 0.1})
    choose(tmp_path)
    assert fake_gpu == ["cudnn", "kernels []"] * 2
    choose(tmp_path, micro_batch_size=4, global_batch_size=8)  # other shapes: measured again
    assert fake_gpu[-2:] == ["flash", "kernels []"]


def test_a_named_kernel_is_used_or_the_error_names_its_key(tmp_path: Path, fake_gpu: list[str]) -> None:
    choose(tmp_path, attention="math", kernels="on")
    assert fake_gpu[0] == "math" and "cross_entropy" in fake_gpu[1] and "causal_softmax" in fake_gpu[1]
    choose(tmp_path, attention="flash", kernels="on")
    assert fake_gpu[2] == "flash" and "causal_softmax" not in fake_gpu[3]  # it belongs to attention's plain form
    with pytest.raises(ConfigError, match="attention"):
        choose(tmp_path, attention="efficient")


def test_a_deterministic_run_chooses_among_kernels_that_repeat() -> None:
    times = {"cudnn": 1.0, "efficient": 1.1, "flash": 1.5, "math": 9.0}
    assert fastest(times) == "cudnn" and fastest(times, deterministic=True) == "flash"
    with pytest.raises(ConfigError):
        fastest({"cudnn": 1.0}, deterministic=True)


def test_on_a_cpu_nothing_is_chosen_and_keys_without_effect_are_noted(tmp_path: Path, capsys: Capsys) -> None:
    choose(tmp_path, ALONE)
    assert not (tmp_path / "operations.json").exists() and capsys.readouterr().err == ""
    choose(tmp_path, ALONE, attention="flash", kernels="on")
    assert "train.attention=flash (no GPU), train.kernels=on (no GPU)\n" in capsys.readouterr().err
