"""Every wrong value of a key is one line before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from common.config import validate
from common.errors import ConfigError
from common.settings import Experiment

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
        ({"parallel": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}, "pipeline 2"),
        ({"parallel": {"data": 2}, "train": {"compile": "model"}}, "compile"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1: "),
        ({"train": {"betas": [0.9]}}, "train.betas.1"),
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


def test_rates_and_lengths_at_their_limits_are_accepted(tmp_path: Path) -> None:
    experiment(tmp_path, train={"lr": 1e-5, "warmup_iterations": 10, "decay_iterations": 10, "seed": 2**64 - 1})
