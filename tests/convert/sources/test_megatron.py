"""Megatron-LM's mp_rank_* files of every age become whole tensors in our order, or one line."""

import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.arguments import Options
from convert.assemble import HUGGING_FACE, assemble
from convert.sources.find import open_source
from convert.sources.megatron import matches, open_folder
from convert.sources.source import QKV, Architecture
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.megatron_files import Layout, recorded_args, write
from tests.convert.sources import checks
from tests.convert.sources.checks import merged

refused = partial(checks.refused, open_source)
UNRECORDED = Options(num_heads=SMALL.n_head, vocab_size=SMALL.vocab_size, activation="gelu_new")
"""What a 2019 file does not say."""
PIPELINED = [("transformer", 2.0), ("encoder", 3.0), ("core", 3.0), ("folded", 3.0)]
CORE = Layout("core", 3.0, tensor=2, pipeline=2)
LAST = "mp_rank_01_001"


@pytest.mark.parametrize(("names", "version"), [("2019", None), ("transformer", 0), ("transformer", 1), *PIPELINED])
@settings(max_examples=6)
@given(data=st.data())
def test_split_files_joined_again_are_the_model(names: str, version: float | None, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from([1, 2, 4]))
    heads = tensor * data.draw(st.integers(1, 2))
    width = heads * data.draw(st.sampled_from([1, 2, 3, 5]))
    pipeline = data.draw(st.integers(1, 2)) if (names, version) in PIPELINED else 1
    chunks = data.draw(st.integers(1, pipeline))
    total = pipeline * chunks
    counts = tuple(data.draw(st.integers(0 if 0 < total - 1 == index else 1, 2)) for index in range(total))
    model = Architecture(
        n_layer=sum(counts),
        n_head=heads,
        n_embd=width,
        n_positions=data.draw(st.integers(1, 5)),
        n_inner=tensor * data.draw(st.integers(1, 9)),
        vocab_size=data.draw(st.integers(1, 400)),
        tied=names in ("2019", "transformer") or data.draw(st.booleans()),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    layout = Layout(names, version, tensor, pipeline, chunks, counts, data.draw(st.booleans()), model, dtype)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), layout)
        assert matches(Path(folder))
        source = open_folder(Path(folder), Options(num_heads=heads, vocab_size=model.vocab_size, activation="gelu_new"))
        assert (source.model, source.qkv, source.notes) == (model, QKV(int(version or 0), tensor), ())  # type: ignore[arg-type]
        assert (source.iteration, len(source.files)) == (100, tensor * pipeline)
        assert source.consumed_samples == (None if names == "2019" else 6400)
        whole = {name: tensor.to(dtype) for name, tensor in truth(model).items()}
        assert_equal(merged(source), whole, model)
        theirs = assemble(source, "h.0.attn.c_attn.weight", qkv=HUGGING_FACE, conv1d=True)
        ours = whole["h.0.attn.c_attn.weight"].view(heads, 3, -1, width).transpose(0, 1).reshape(3 * width, width)
        assert torch.equal(theirs, ours.t())


def test_optimizers_and_random_states_are_no_obstacle(tmp_path: Path) -> None:
    def add_states(stage: int, rank: int, content: dict[str, Any]) -> None:
        groups: defaultdict[str, Any] = defaultdict(list, params=[torch.zeros(4)])
        content["optimizer"] = {"fp32_from_fp16": [[torch.ones(5)]], "groups": groups}
        content["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]

    for layout in (Layout(tensor=2, edit=add_states), replace(CORE, edit=add_states)):
        folder = write(tmp_path / layout.names, layout)
        source = open_folder(folder, UNRECORDED)
        assert_equal(merged(source), truth())
        assert not source.has_moments


def test_before_fused_gelu_its_exact_form_was_the_default(tmp_path: Path) -> None:
    layout = Layout("encoder", 3.0, edit=lambda stage, rank, content: delattr(content["args"], "bias_gelu_fusion"))
    assert open_folder(write(tmp_path / "release", layout), Options()).model == replace(SMALL, activation="gelu")


def test_a_head_whose_values_differ_is_untied(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False)
    layout = replace(CORE, model=model, args={"num_attention_heads": 8, "vocab_size": 300})
    source = open_folder(write(tmp_path / "release", layout), Options(activation="gelu_new"))
    assert source.model == model and len(source.notes) == 1


def test_gpt2s_vocabulary_is_recognised_by_its_padded_rows(tmp_path: Path) -> None:
    rows = 50304
    model = Architecture(n_layer=1, n_head=2, n_embd=8, n_positions=2, n_inner=8, vocab_size=rows)
    layout = Layout("core", 3.0, 2, model=model, dtype=torch.float16)
    said = recorded_args(layout) | {"vocab_size": None}

    def pad(stage: int, rank: int, content: dict[str, Any]) -> None:
        content["model"]["embedding.word_embeddings.weight"] = torch.zeros(rows // 2, 8).half()

    source = open_folder(write(tmp_path / "iter_0000100", replace(layout, args=said, edit=pad)), Options())
    assert (source.tensors["wte.weight"].shape, source.model.vocab_size) == ((rows, 8), 50257)


def test_heads_are_64_wide_if_nothing_says_otherwise(tmp_path: Path) -> None:
    model = Architecture(n_layer=1, n_head=2, n_embd=128, n_positions=2, n_inner=8, vocab_size=256)
    source = open_folder(write(tmp_path / "a", Layout(tensor=2, model=model)), Options())
    assert source.model == model and len(source.notes) == 2  # heads and activation are assumed
    refused(write(tmp_path / "b", Layout()), "--num-heads")
    intact = write(tmp_path / "c", Layout("core", 3.0))
    refused(intact, "--vocab-size", "385", "384 rows", vocab_size=385)
    assert open_folder(intact, Options(vocab_size=384)).model.vocab_size == 384


def test_the_qkv_version_is_recorded_or_given_and_never_guessed(tmp_path: Path) -> None:
    nested = write(tmp_path / "nested", Layout("transformer", None, 2))
    refused(nested, "give --qkv-version")
    assert_equal(merged(open_folder(nested, Options(qkv_version=0))), truth())
    recorded = write(tmp_path / "recorded", Layout("transformer", 1, 2))
    refused(recorded, "checkpoint_version is 1", "--qkv-version is 0", qkv_version=0)
    fork = write(tmp_path / "fork", Layout("2019", 2.0, 2))
    assert_equal(merged(open_folder(fork, replace(UNRECORDED, qkv_version=2))), truth())
    refused(write(tmp_path / "fourth", Layout("core", 4.0)), "checkpoint_version is 4.0")


def test_the_folders_name_says_the_iteration_of_its_files(tmp_path: Path) -> None:
    refused(write(tmp_path / "iter_0000200", CORE), "iteration 100", "iter_0000100")
    assert open_folder(write(tmp_path / "release", CORE), Options()).iteration == 100
    assert open_folder(write(tmp_path / "iter_0000300", replace(CORE, iteration=None)), Options()).iteration == 300


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"tensor_model_parallel_size": 4}, ["mp_rank_02_000", "4 tensor ranks"]),
        ({"pipeline_model_parallel_size": 3}, ["mp_rank_00_002", "3 pipeline ranks"]),
        ({"virtual_pipeline_model_parallel_size": 2}, ["virtual_pipeline_model_parallel_size is 2"]),
        ({"num_layers": 6}, ["args.num_layers is 6", "have 4"]),
        ({"num_attention_heads": 5, "kv_channels": None}, ["5 heads"]),
    ],
)
def test_args_that_contradict_the_tensors_or_the_folders_are_refused(
    said: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    refused(write(tmp_path / "iter_0000100", replace(CORE, args=recorded_args(CORE) | said)), *parts)


FC2, FC1 = "decoder.layers.1.mlp.linear_fc2.bias", "decoder.layers.1.mlp.linear_fc1.bias"
ROUTER = "decoder.layers.1.mlp.router.weight"
CHANGES: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (lambda content: content.update(iteration=200), ["iteration is 200", "100"]),
    (lambda content: content.update(checkpoint_version=2.0), ["checkpoint_version is 2.0", "3.0"]),
    (lambda content: setattr(content["args"], "num_attention_heads", 4), ["num_attention_heads is 4"]),
    (lambda content: setattr(content["args"], "tensor_model_parallel_size", 4), [LAST, "size is 4", "has 2"]),
    (lambda content: content["model"].pop(FC2), ["stage 1", "'h.3.mlp.c_proj.bias'", "tensor rank 1"]),
    (lambda content: content["model"].update({FC2: torch.zeros(33)}), ["'h.3.mlp.c_proj.bias'", "[33]", "[32]"]),
    (lambda content: content["model"].update({FC1: torch.zeros(64).half()}), ["'h.3.mlp.c_fc.bias'", "float16"]),
    (lambda content: content["model"].update({ROUTER: torch.zeros(3)}), [LAST, repr(ROUTER)]),
    (
        lambda content: content.update(dict.fromkeys(("model0", "model1"), content.pop("model"))),
        [LAST, "is (2,"],
    ),
]


@pytest.mark.parametrize(("change", "parts"), CHANGES, ids=[" ".join(parts) for _, parts in CHANGES])
def test_a_rank_that_does_not_belong_to_the_others_is_refused_by_name(
    change: Callable[[dict[str, Any]], object], parts: list[str], tmp_path: Path
) -> None:
    def edit(stage: int, rank: int, content: dict[str, Any]) -> None:
        if (stage, rank) == (1, 1):
            change(content)

    refused(write(tmp_path / "iter_0000100", replace(CORE, edit=edit)), *parts)


def of_ranks(order: str, said: Mapping[str, Any]) -> Callable[[int, int, dict[str, Any]], None]:
    """Records the ranks of a training on 3 data ranks, each file saved by another of them."""

    def edit(stage: int, rank: int, content: dict[str, Any]) -> None:
        data = (stage + rank) % 3
        own = data + 3 * stage if order == "data ranks first" else stage + 2 * data
        vars(content["args"]).update({"rank": rank + 2 * own, **said})

    return edit


@pytest.mark.parametrize(
    ("order", "said", "one", "other", "named"),
    [
        ("data ranks first", {"world_size": 12}, "00_000", "01_000", "rank 3, which is tensor rank 1 of"),
        ("data ranks first", {"world_size": 12}, "01_000", "01_001", "is tensor rank 1 of pipeline stage 1, but"),
        ("data ranks first", {}, "01_000", "00_000", "rank 3, which is tensor rank 1 of"),
        ("stages first", {"use_tp_pp_dp_mapping": True, "world_size": 12}, "00_000", "00_001", "pipeline stage 1, but"),
    ],
)
def test_folders_of_ranks_that_were_exchanged_are_refused_by_name(
    order: str, said: dict[str, Any], one: str, other: str, named: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "iter_0000100", replace(CORE, edit=of_ranks(order, said)))
    assert_equal(merged(open_folder(folder, Options())), truth())
    for source, target in ((one, "x"), (other, one), ("x", other)):
        (folder / f"mp_rank_{source}").rename(folder / f"mp_rank_{target}")
    refused(folder, f"mp_rank_{min(one, other)}", named)


def test_lost_and_foreign_ranks_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "iter_0000100", replace(CORE, tensor=4))
    shutil.rmtree(folder / "mp_rank_03_001")
    refused(folder, "mp_rank_03_001")
    shutil.rmtree(folder / "mp_rank_03_000")
    refused(folder, "mp_rank_03_000", "4 tensor ranks")
    shutil.copytree(folder / "mp_rank_02_001", folder / "mp_rank_02")
    refused(folder, "mp_rank_02_000")
    folder = write(tmp_path / "2019", Layout(tensor=4))
    shutil.rmtree(folder / "mp_rank_03")  # shows in the shapes
    refused(folder, "mp_rank_03", "4 tensor ranks", num_heads=8)
    folder = write(tmp_path / "half", Layout(pipeline=2))
    shutil.rmtree(folder / "mp_rank_00_001")
    refused(folder, "'ln_f.bias'", num_heads=8)
