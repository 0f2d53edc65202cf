"""Every wrong value of a key is one line before anything starts; every message names values that are accepted."""

import copy
import re
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
from common.settings import Experiment, GenerateSettings, ParallelSettings
from tests.training.helpers import BYTE_VOCABULARY, byte_documents, write_corpus
from training.dataset.corpus import split_documents
from training.optimizer import learning_rate
from training.parallel.device import check_offload
from training.run_plan import make_plan

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 32, "seq_len": 16, "vocab_size": BYTE_VOCABULARY}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "bytes"
    write_corpus(prefix, byte_documents(40))
    return prefix


def configuration(prefix: Path, **sections: Any) -> dict[str, Any]:
    """One model, `m`, on a dataset of its own."""
    run = {"model": MODEL, "train": {"iterations": 10, "split": "90,10,0"}, **sections}
    return {
        "run": str(prefix.parent / "run"),
        "models": {"m": {"data": [{"prefix": str(prefix), "weight": 1}], **run}},
    }


AUTO = {"auto": True}


@pytest.mark.parametrize("written", ["auto", AUTO, {"auto": "yes", "gpus": "64", "tensor": 1}])
def test_a_layout_that_the_planner_will_choose_needs_the_samples_per_step_alone(prefix: Path, written: object) -> None:
    train = {"iterations": 10, "global_batch_size": 12}
    read = validate(configuration(prefix, parallel=written, train=train), "config.yaml").models["m"]
    assert read.parallel.auto and read.train.micro_batch_size == read.train.accumulation == 0
    assert read.world_size == (64 if isinstance(written, dict) and "gpus" in written else 0)
    assert Experiment.model_validate(read.model_dump()) == read, "a resolved file reads back"


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        ("auto", {}, "parallel is auto, but train.global_batch_size is missing; set it to the samples per step"),
        ("auto", {"global_batch_size": 8, "accumulation": 2}, "chooses train.accumulation 2, too; leave it out"),
        ("auto", {"global_batch_size": 8, "micro_batch_size": 3}, "is not a multiple of train.micro_batch_size 3"),
        ("auto", {"global_batch_size": 8, "compile": "model"}, "train.compile model works without data-parallel ranks"),
        ({**AUTO, "tensor": 2}, {"global_batch_size": 8}, "parallel: auto chooses tensor, too; leave it out"),
        ({"gpus": 8, "data": 8}, {}, "gpus 8 is for auto: true; elsewhere it follows from pipeline, data and tensor"),
        ("automatic", {}, "models.m.parallel"),
    ],
)
def test_what_contradicts_the_planners_choice_is_one_line(
    prefix: Path, parallel: object, train: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        validate(configuration(prefix, parallel=parallel, train={"iterations": 10, **train}), "config.yaml")
    assert says in str(error.value) and "\n" not in str(error.value)


INTERLEAVED = {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("section", "given", "says"),
    [
        ("parallel", {"schedule": "interleaved_1f1b", "virtual_stages": 2}, "needs pipeline 2 or more"),
        ("train", {"betas": [0.9, 1.0]}, "train.betas.1: must be less than 1"),
        ("train", {"betas": [-0.1, 0.9]}, "train.betas.0: must be greater than or equal to 0"),
        ("train", {"betas": [0.9]}, "train.betas.1"),
        ("train", {"betas": [0.9, 0.9, 0.9]}, "train.betas: Tuple should have at most 2 items"),
        ("train", {"seed": 2**64}, "train.seed: must be less than 18446744073709551616"),
        ("train", {"seed": -1}, "train.seed"),
        ("train", {"weight_decay": float("nan")}, "train.weight_decay"),
        ("train", {"lr": float("inf")}, "train.lr"),
        ("train", {"lr": 1e300}, "train.lr"),
        ("train", {"eval_batches": 0}, "train.eval_batches: must be greater than 0"),
        ("train", {"save_interval": 2**80}, "train.save_interval"),
        ("train", {"warmup_iterations": 11}, "models.m.train.warmup_iterations 11 is longer than the run, 10"),
        ("train", {"deterministic": True, "attention": "cudnn"}, "set attention to flash, math or auto"),
        ("train", {"compile": "all"}, "train.compile: must be 'auto', 'none', 'blocks' or 'model'"),
        ("model", {"n_layer": 10**9}, "model.n_layer"),
        ("model", {"n_embd": 2**40}, "model.n_embd"),
        ("watch", {"spike": float("inf")}, "watch.spike: must be a finite number"),
        ("watch", {"silence_seconds": 1e300}, "watch.silence_seconds"),
        *(
            ("train", {"split": split}, "must be three shares for train, valid and test, such as 949,50,1")
            for split in ("1e308,1e308,0", "1e308,0,0", "nan,1,1", "-1,1,1", "1,1,1,1", "0,0,0", "0,1,1", "", "a,b,c")
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_key(
    prefix: Path, section: str, given: dict[str, Any], says: str
) -> None:
    raw = configuration(prefix)
    raw["models"]["m"][section] = {**raw["models"]["m"].get(section, {}), **given}
    with pytest.raises(ConfigError) as error:
        validate(raw, "config.yaml")
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "read"), [(True, "blocks"), ("no", "none"), ("none", "none"), (None, "auto"), ("model", "model")]
)
def test_compile_was_a_switch(prefix: Path, written: object, read: str) -> None:
    raw = configuration(prefix, train={"iterations": 10, "compile": written})
    assert validate(raw, "config.yaml").models["m"].train.compile == read


def test_one_graph_of_the_model_needs_whole_parameters(prefix: Path) -> None:
    raw = configuration(prefix, train={"iterations": 10, "compile": "model"}, parallel={"data": 2})
    with pytest.raises(ConfigError, match="is above 1 and gathers parameters"):
        validate(raw, "config.yaml")


def test_a_split_on_the_command_line_obeys_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="must be three shares"):
        split_documents("1e308,0,0", 10)


def test_offloading_without_a_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"models\.m\.parallel\.offload .* set it to false"):
        check_offload(ParallelSettings(data=2, zero_stage=1, offload=True), "m")


batches = st.fixed_dictionaries(
    {
        "parallel": st.one_of(
            st.fixed_dictionaries({"pipeline": st.integers(1, 4), "schedule": st.sampled_from(["gpipe", "1f1b"])}),
            st.just(INTERLEAVED),
        ),
        "data": st.integers(1, 3),
        "micro_batch_size": st.integers(0, 5),
        "accumulation": st.integers(0, 9),
        "global_batch_size": st.integers(0, 40),
    }
)


@given(batches)
def test_following_the_messages_about_batches_leads_to_valid_settings(given: dict[str, Any]) -> None:
    parallel = {**given.pop("parallel"), "data": given.pop("data")}
    train = {"iterations": 1, **given}
    for _ in range(3):
        try:
            run = Experiment.model_validate({"model": MODEL, "parallel": parallel, "train": train})
        except ValueError as error:
            found = re.search(r"; set (.*)", str(error).split(" [type=")[0])
            assert found, error
            cures = re.findall(r"(?:train\.(\w+)|it) to (\d+)", found[1])
            train |= {key or "global_batch_size": int(value) for key, value in cures}
        else:
            break
    else:
        pytest.fail("three messages were not enough")
    sizes = (run.train.micro_batch_size, run.accumulation, parallel["data"])
    assert sizes[0] * sizes[1] * sizes[2] == run.train.global_batch_size
    assert run.parallel.takes(run.accumulation)
    assert Experiment.model_validate(run.model_dump()) == run


# ------------------------------------------------------------------------------------------------ any value at all

ODD = st.one_of(
    st.sampled_from(
        [0, 1, 2, 3, 7, -1, 2**31, 2**63, 2**64, 10**30, 0.5, 1.0, 1e308, 5e-324, -0.0, "", "\0", "1e308,0,0"]
    ),
    st.sampled_from([None, True, False, [], [0.5], [0.5, 2], {}, "auto", "1f1b", "nan", float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)


def leaves(section: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key below a section."""
    found = []
    for name, field in section.model_fields.items():
        inner = next((kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)), None)
        deeper = () if name != "data" else (0,)
        found += leaves(inner, (*path, name, *map(str, deeper))) if inner else [(*path, name)]
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


KEYS = leaves(Experiment)


@given(st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=3))
@hypothesis_settings(max_examples=200)
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
    assert str(plan)
    train = plan.experiment.train
    assert all(0 <= learning_rate(step, train) <= 3e38 for step in (0, train.iterations - 1, train.iterations))


@given(st.dictionaries(st.sampled_from([path[-1] for path in leaves(GenerateSettings)]), ODD, max_size=3))
def test_no_value_of_a_generate_key_gives_a_traceback(given: dict[str, Any]) -> None:
    try:
        validate({"run": "r", "urls": ["u"], "generate": given}, "config.yaml")
    except ConfigError as error:
        assert "\n" not in str(error)
