"""Every wrong value of a key is one line before anything starts; every message names values that are accepted."""

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import BaseModel

from common.config import validate
from common.errors import ConfigError, ToolkitError
from common.settings import Experiment, ParallelSettings
from tests.training.helpers import BYTE_VOCABULARY, Patch, byte_documents, write_corpus
from training.dataset.corpus import split_documents
from training.optimizer import learning_rate
from training.parallel.device import check_offload
from training.run_plan import make_plan

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 32, "seq_len": 16, "vocab_size": BYTE_VOCABULARY}
AUTO = {"auto": True}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "bytes"
    write_corpus(prefix, byte_documents(40))
    return prefix


def configuration(prefix: Path, **sections: Any) -> dict[str, Any]:
    """One model, `m`, on a dataset of its own."""
    train = {"iterations": 10, "split": "90,10,0", **sections.pop("train", {})}
    run = {"model": {**MODEL, **sections.pop("model", {})}, "train": train, **sections}
    return {"run": str(prefix.parent / "run"), "models": {"m": {"data": [{"prefix": str(prefix), "weight": 1}], **run}}}


@pytest.mark.parametrize("written", ["auto", AUTO, {"auto": "yes", "gpus": "64", "tensor": 1}])
def test_a_layout_that_the_planner_will_choose_needs_the_samples_per_step_alone(prefix: Path, written: object) -> None:
    train = {"iterations": 10, "global_batch_size": 12}
    read = validate(configuration(prefix, parallel=written, train=train), "config.yaml").models["m"]
    assert read.parallel.auto and read.train.micro_batch_size == read.train.accumulation == 0
    assert read.world_size == (64 if isinstance(written, dict) and "gpus" in written else 0)
    assert Experiment.model_validate(read.model_dump()) == read, "a resolved file reads back"


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"parallel": "auto"}, "train.global_batch_size is missing"),
        ({"parallel": "auto", "train": {"global_batch_size": 8, "accumulation": 2}}, "train.accumulation 2"),
        ({"parallel": "auto", "train": {"global_batch_size": 8, "micro_batch_size": 3}}, "train.micro_batch_size 3"),
        ({"parallel": "auto", "train": {"global_batch_size": 8, "compile": "model"}}, "train.compile model"),
        ({"parallel": {**AUTO, "tensor": 2}, "train": {"global_batch_size": 8}}, "tensor"),
        ({"parallel": {"gpus": 8, "data": 8}}, "gpus 8"),
        ({"parallel": "automatic"}, "models.m.parallel"),
        ({"parallel": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}, "pipeline 2"),
        ({"parallel": {"data": 2}, "train": {"compile": "model"}}, "compile"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1: must be less than 1"),
        ({"train": {"betas": [-0.1, 0.9]}}, "train.betas.0: must be greater than or equal to 0"),
        ({"train": {"betas": [0.9]}}, "train.betas.1"),
        ({"train": {"seed": 2**64}}, "train.seed"),
        ({"train": {"seed": -1}}, "train.seed"),
        ({"train": {"lr": float("inf")}}, "train.lr"),
        ({"train": {"eval_batches": 0}}, "train.eval_batches"),
        ({"train": {"warmup_iterations": 11}}, "models.m.train.warmup_iterations 11"),
        ({"train": {"deterministic": True, "attention": "cudnn"}}, "attention"),
        ({"train": {"compile": "all"}}, "train.compile"),
        ({"model": {"n_layer": 10**9}}, "model.n_layer"),
        ({"watch": {"spike": float("inf")}}, "watch.spike"),
        *(({"train": {"split": split}}, "train.split") for split in ("1e308,0,0", "nan,1,1", "-1,1,1", "0,1,1", "a,b")),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_key(prefix: Path, sections: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(configuration(prefix, **sections), "config.yaml")
    assert names in str(error.value) and "\n" not in str(error.value)


def test_what_depends_on_data_or_device_is_refused_before_anything_starts(monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match="1e308,0,0"):
        split_documents("1e308,0,0", 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"models\.m\.parallel\.offload"):
        check_offload(ParallelSettings(data=2, zero_stage=1, offload=True), "m")


ODD = st.one_of(
    st.sampled_from([0, 1, 7, -1, 2**31, 2**64, 10**30, 0.5, 1e308, 5e-324, "", "\0", "1e308,0,0", "auto", "nan"]),
    st.sampled_from([None, True, False, [], [0.5], [0.5, 2], {}, "1f1b", float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)


def leaves(section: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key below a section."""
    found = []
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        deeper = ("0",) if name == "data" else ()
        found += leaves(inner, (*path, name, *deeper)) if inner else [(*path, name)]
    return found


@given(st.dictionaries(st.sampled_from(leaves(Experiment)), ODD, min_size=1, max_size=3))
@hypothesis_settings(max_examples=150)
def test_no_value_of_any_key_gives_anything_but_one_line_or_a_plan(
    prefix: Path, given: dict[tuple[str, ...], Any]
) -> None:
    raw = copy.deepcopy(configuration(prefix))
    for path, value in given.items():
        target: Any = raw["models"]["m"]
        for part in path[:-1]:
            target = target[int(part)] if part.isdigit() else target.setdefault(part, {})
        target[path[-1]] = value
    try:
        plan = make_plan(validate(raw, "config.yaml"), "m")
    except ToolkitError as error:
        assert "\n" not in str(error)
        return
    train = plan.experiment.train
    assert str(plan)
    assert all(0 <= learning_rate(step, train) <= 3e38 for step in (0, train.iterations - 1, train.iterations))
