"""A checkpoint of any origin becomes one that our training resumes from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from convert.assemble import assemble
from convert.from_megatron import main
from convert.sources.find import open_source
from tests.convert.sources.torch_dist_files import add_model, padded, write_folder
from tests.helpers import run_main
from tests.training.helpers import Capsys, copy_run, launch_ok, make_run, refusal, train_tiny
from training import train
from training.checkpoint import load_weights, resolve
from training.huggingface.pretrained import convert_tensors


def test_with_moments_the_training_continues_with_the_same_digits(tiny_run: Path, tmp_path: Path) -> None:
    config = copy_run(tiny_run, tmp_path / "run")
    folder, trained = tmp_path / "run" / "models" / "tiny", tiny_run / "models" / "tiny"
    shutil.rmtree(folder)
    assert run_main(main, "--checkpoint", trained / "iter_0000010", "--config", config, "--model", "tiny") == 0
    old, new = open_source(trained / "iter_0000010"), open_source(folder)
    assert (new.iteration, new.consumed_samples, new.step) == (10, 80, 10) == (10, old.consumed_samples, old.step)
    for kind in ("exp_avg", "exp_avg_sq"):
        for name in old.tensors:
            moments = [assemble(source, name, tensor=source.moments[kind][name]) for source in (old, new)]
            assert torch.equal(*moments) and moments[0].any(), name
    launch_ok(2, "training.train", "--config", config, "--model", "tiny")
    weights = [load_weights(resolve(run / "iter_0000020")) for run in (trained, folder)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    other = make_run(tmp_path / "other", train={"global_batch_size": 16})
    assert run_main(main, "--checkpoint", trained / "iter_0000010", "--config", other, "--model", "tiny") == 0
    assert resolve(tmp_path / "other" / "models" / "tiny").progress.consumed_samples == 80  # those of the source


def test_the_new_runs_optimizer_gets_its_moments_if_the_source_has_them(tmp_path: Path, capsys: Capsys) -> None:
    config, models = make_run(tmp_path, train={"optimizer": "muon"}), tmp_path / "models"
    assert train_tiny(config) == 0
    for optimizer, said in ("muon", "optimiser state for muon after 4 steps"), ("adamw", "no optimiser state"):
        words = ("--config", config, "--model", "tiny", "--name", optimizer, f"train.optimizer={optimizer}")
        assert run_main(main, "--checkpoint", models / "tiny", *words) == 0 and said in capsys.readouterr().out
    old, new = (open_source(models / name).moments for name in ("tiny", "muon"))
    for kind in old:
        assert new[kind].keys() == old[kind].keys()  # the matrices of the layers have no exp_avg_sq
        assert all(torch.equal(new[kind][name].read(), old[kind][name].read()) for name in old[kind]), kind


def test_megatron_cores_muon_goes_on_and_its_position_embeddings_get_a_second_moment(
    tmp_path: Path, capsys: Capsys
) -> None:
    config, models = make_run(tmp_path, train={"optimizer": "muon", "muon_momentum": 0.75}), tmp_path / "models"
    assert train_tiny(config) == 0
    old, theirs = open_source(models / "tiny"), tmp_path / "iter_0000004"
    kept = {kind: {name: tensor.read() for name, tensor in tensors.items()} for kind, tensors in old.moments.items()}
    second = kept["exp_avg_sq"].pop("wpe.weight")  # AdamW's here, Muon's there
    muons = {name: kept["exp_avg"].pop(name) for name in old.tensors if name not in kept["exp_avg_sq"]}
    weights = {name: tensor.read() for name, tensor in old.tensors.items()}
    common = {"iteration": 4, "optimizer": {0: {}, 1: {"state": {"common_step": torch.tensor(4.0)}}}}
    writer = write_folder(theirs, weights, old.model, common=common)
    for kind, tensors in {"momentum_buffer": muons, **kept}.items():
        add_model(writer, padded(tensors), prefix=f"optimizer.state.{kind}.", n_layer=old.model.n_layer)
    writer.close()
    words = ("--config", config, "--model", "tiny", "--name", "muon", "train.iterations=5")
    assert run_main(main, "--checkpoint", theirs, *words) == 0
    assert "for muon after 4 steps (the second moment of wpe.weight, which Muon" in capsys.readouterr().out
    new = open_source(models / "muon").moments
    for kind, tensors in {"exp_avg": muons | kept["exp_avg"], "exp_avg_sq": kept["exp_avg_sq"]}.items():
        assert all(torch.equal(new[kind][name].read(), tensor) for name, tensor in tensors.items()), kind
    (estimate,) = new["exp_avg_sq"]["wpe.weight"].read().unique()
    assert float(estimate) == pytest.approx(float(muons["wpe.weight"].square().mean()) * 7 * (1 - 0.999**4), rel=1e-5)
    assert second.shape == muons["wpe.weight"].shape
    assert run_main(train.main, "--config", config, "--model", "tiny", "--name", "muon", "train.iterations=5") == 0


def test_without_moments_it_says_so_and_training_starts_from_the_weights(tmp_path: Path, capsys: Capsys) -> None:
    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=257))
    theirs.save_pretrained(tmp_path / "theirs")
    config = make_run(tmp_path, train={"iterations": 1})
    assert run_main(main, "--checkpoint", tmp_path / "theirs", "--config", config, "--model", "tiny") == 0
    assert "no optimiser state" in capsys.readouterr().out
    folder = tmp_path / "models" / "tiny"
    manifest = resolve(folder)
    expected = dict(convert_tensors(theirs.state_dict(), manifest.experiment.model))
    weights = load_weights(manifest)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert run_main(train.main, "--config", config, "--model", "tiny") == 0
    assert json.loads((folder / "done.json").read_text())["iteration"] == 1


def test_what_does_not_fit_is_one_line_and_changes_nothing(tiny_run: Path, tmp_path: Path, capsys: Capsys) -> None:
    trained = tiny_run / "models" / "tiny"
    before = sorted(trained.iterdir())
    assert run_main(main, "--checkpoint", trained, "--config", tiny_run / "config.yaml", "--model", "tiny") == 2
    assert "iter_0000020" in capsys.readouterr().err and sorted(trained.iterdir()) == before
    for key, value in ("n_layer", 3), ("n_head", 8):
        other = make_run(tmp_path, model={key: value})
        assert f"models.tiny.model.{key}" in refusal(
            capsys, main, "--checkpoint", trained, "--config", other, "--model", "tiny"
        )
        assert not (tmp_path / "models" / "tiny").exists()


def test_a_conversion_that_is_wrong_leaves_no_checkpoint(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def wrong(*arguments: Any, **named: Any) -> torch.Tensor:
        tensor = assemble(*arguments, **named)
        return tensor.t().contiguous() if tensor.shape == (32, 32) else tensor

    monkeypatch.setattr("convert.targets.ours.assemble", wrong)
    config, trained = make_run(tmp_path), tiny_run / "models" / "tiny"
    assert run_main(main, "--checkpoint", trained, "--config", config, "--model", "tiny") == 1
    assert "the attention of layer 0" in capsys.readouterr().err
    assert not list((tmp_path / "models" / "tiny").iterdir())
