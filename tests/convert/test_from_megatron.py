"""A checkpoint of any origin becomes one that our training resumes from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from convert.assemble import assemble
from convert.from_megatron import main
from convert.sources.find import open_source
from tests.training.helpers import launch_ok, make_run, run_main
from training import train
from training.checkpoint import load_weights, resolve
from training.huggingface.pretrained import from_hugging_face


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of a run of six iterations over two tensor-parallel processes, saved every three."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_run(folder, parallel={"tensor": 2}, train={"iterations": 6, "save_interval": 3})
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    return folder / "models" / "tiny"


def test_with_moments_the_training_continues_with_the_same_digits(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path, parallel={"tensor": 2}, train={"iterations": 6})
    assert run_main(main, "--checkpoint", trained / "iter_0000003", "--config", config, "--model", "tiny") == 0
    said = capsys.readouterr().out
    assert "weights, optimiser state after 3 steps; iteration 3, 24 samples consumed; logits equal" in said
    made = tmp_path / "models" / "tiny" / "iter_0000003"
    old, new = open_source(trained / "iter_0000003"), open_source(made)
    assert new.step == old.step == 3 and sorted(new.moments["exp_avg"]) == sorted(old.tensors)
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    weights = [load_weights(resolve(folder / "iter_0000006")) for folder in (trained, made.parent)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_without_moments_it_says_so_and_training_starts_from_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=257))
    theirs.save_pretrained(tmp_path / "theirs")
    config = make_run(tmp_path, train={"iterations": 1})
    capsys.readouterr()
    assert run_main(main, "--checkpoint", tmp_path / "theirs", "--config", config, "--model", "tiny") == 0
    assert "weights, no optimiser state: it starts from zero, and the learning rate" in capsys.readouterr().out
    folder = tmp_path / "models" / "tiny"
    manifest = resolve(folder)
    expected = from_hugging_face(theirs.state_dict(), manifest.experiment.model)
    found = load_weights(manifest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (card,) = folder.glob("iter_*/run.json")
    assert json.loads(card.read_text())["inputs"][0]["path"] == str(tmp_path / "theirs")
    assert run_main(train.main, "--config", config, "--model", "tiny") == 0
    assert json.loads((folder / "done.json").read_text())["iteration"] == 1


def test_a_model_of_other_sizes_or_a_folder_with_checkpoints_is_one_line_and_changes_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(trained.iterdir())
    config = trained.parent.parent / "config.yaml"
    assert run_main(main, "--checkpoint", trained, "--config", config, "--model", "tiny") == 2
    assert "has checkpoints already (iter_0000006); convert under another model name" in capsys.readouterr().err
    assert sorted(trained.iterdir()) == before
    other = make_run(tmp_path, model={"n_layer": 3})
    assert run_main(main, "--checkpoint", trained, "--config", other, "--model", "tiny") == 2
    error = capsys.readouterr().err
    assert "has n_layer 2, but models.tiny.model.n_layer is 3; set it to 2\n" in error and error.count("\n") == 1
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_conversion_that_is_wrong_leaves_no_checkpoint(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: Any, **named: Any) -> torch.Tensor:
        tensor = assemble(*arguments, **named)
        return tensor.t().contiguous() if tensor.shape == (32, 32) else tensor

    monkeypatch.setattr("convert.targets.ours.assemble", wrong)
    config = make_run(tmp_path)
    assert run_main(main, "--checkpoint", trained, "--config", config, "--model", "tiny") == 1
    assert "differs from the source's" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "models" / "tiny").iterdir()] == []
