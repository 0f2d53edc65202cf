"""Every wrong value of a key is one line before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from common.config import load_settings, validate
from common.errors import ConfigError
from common.settings import Experiment, TrainSettings
from tests.conftest import ROOT

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 32, "seq_len": 16, "vocab_size": 257}


def experiment(folder: Path, **sections: Any) -> Experiment:
    """The model of a configuration with these sections."""
    train = {"iterations": 10, "split": "90,10,0", **sections.pop("train", {})}
    model = {"model": {**MODEL, **sections.pop("model", {})}, "train": train, **sections}
    raw = {"run": str(folder), "models": {"m": {"data": [{"prefix": str(folder / "bytes"), "weight": 1}], **model}}}
    return validate(raw, "config.yaml").models["m"]


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"parallel": "auto"}, "train.global_batch_size is missing"),
        ({"parallel": {"auto": True, "tensor": 2}, "train": {"global_batch_size": 8}}, "tensor"),
        ({"parallel": {"gpus": 8, "data": 8}}, "gpus 8"),
        ({"parallel": "automatic"}, "models.m.parallel"),
        ({"parallel": {"data": 2, "offload": True}}, "parallel.offload true needs parallel.zero_stage 1, 2 or 3"),
        ({"train": {"cycle_iterations": 2, "lr_decay": "wsd"}}, "train.cycle_iterations 2 needs train.lr_decay cosine"),
        ({"train": {"cooldown": "sqrt"}}, "train.cooldown sqrt needs train.lr_decay wsd"),
        ({"train": {"cooldown_iterations": 2}}, "train.cooldown_iterations 2 needs train.lr_decay wsd"),
        (
            {"train": {"cooldown_iterations": 9, "lr_decay": "wsd", "warmup_iterations": 2}},
            "train.cooldown_iterations 9 needs as many iterations between",
        ),
        ({"train": {"decay_iterations": 5, "lr_decay": "constant"}}, "other than constant; set that, or leave"),
        ({"parallel": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}, "pipeline 2"),
        ({"parallel": {"data": 2}, "train": {"compile": "model"}}, "compile"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1: "),
        ({"train": {"betas": [0.9]}}, "train.betas: has too few"),
        ({"train": {"seed": 2**64}}, "train.seed"),
        ({"train": {"seed": -1}}, "train.seed"),
        ({"train": {"lr": float("inf")}}, "train.lr"),
        ({"train": {"lr": 1e-6}}, "min_lr 1e-05"),
        ({"train": {"warmup_iterations": 11}}, "models.m.train: warmup_iterations 11"),
        ({"train": {"decay_iterations": 1, "warmup_iterations": 2}}, "decay_iterations 1"),
        ({"train": {"deterministic": True, "attention": "cudnn"}}, "attention"),
        ({"model": {"n_layer": 10**9}}, "model.n_layer"),
        *(({"train": {"split": split}}, "train.split") for split in ("1e308,0,0", "nan,1,1", "-1,1,1", "0,1,1", "a,b")),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_key(tmp_path: Path, sections: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, **sections)
    assert names in str(error.value) and "\n" not in str(error.value)


def test_a_key_without_effect_is_said_and_a_default_never_is(tmp_path: Path) -> None:
    parallel = {"sequence_parallel": True, "schedule": "gpipe", "zero_stage": 3}
    train = {"keep_every": 2, "sample_prompt": "x", "hysteresis": 3, "initial_loss_scale": 8.0, "loss_scale_window": 9}
    train |= {"warmup": 0.5, "warmup_iterations": 2, "lr_decay": "constant", "min_lr": 0.0, "split": "1,0,0"}
    train |= {"weight_decay": 0, "no_decay": [], "eval_interval": 5}
    watch = {"spike": 0, "spike_reaction": "stop"}
    said = experiment(tmp_path, parallel=parallel, train=train, watch=watch).without_effect
    assert "parallel.zero_stage 3 (needs parallel.data 2 or more)" in said
    keys = {*parallel, *train, "spike_reaction"} - {"warmup_iterations", "lr_decay", "split", "weight_decay"}
    assert sorted(line.split()[0].partition(".")[2] for line in said) == sorted(keys)
    scaled = {
        "parallel": {"tensor": 2, "pipeline": 2, "data": 2, **parallel},
        "train": {"keep_last": 1, "keep_every": 2},
    }
    assert not experiment(tmp_path, **scaled).without_effect
    resolved = experiment(tmp_path).model_dump(mode="json")  # every default is written there
    assert not Experiment.model_validate(resolved).without_effect


def test_no_key_of_the_shipped_configurations_is_without_effect() -> None:
    for path in (ROOT / "config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))):
        assert not [line for model in load_settings(path).models.values() for line in model.without_effect], path


def test_a_manifest_with_a_key_that_is_refused_is_still_read() -> None:
    assert TrainSettings(iterations=9, lr_decay="linear", cycle_iterations=2, cooldown_iterations=99)


def test_rates_and_lengths_at_their_limits_are_accepted(tmp_path: Path) -> None:
    experiment(tmp_path, train={"lr": 1e-5, "warmup_iterations": 10, "decay_iterations": 10, "seed": 2**64 - 1})
