"""Megatron-LM's mp_rank_* files of every age become whole tensors in our order, or one line."""

import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.arguments import Options
from convert.assemble import HUGGING_FACE, assemble
from convert.sources.megatron import matches, open_folder
from convert.sources.source import QKV, Architecture
from tests.convert.conftest import Made
from tests.convert.deepspeed_files import inside
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import exchange, merged, refused
from tests.convert.megatron_files import Layout, write

UNRECORDED = Options(num_heads=SMALL.n_head, vocab_size=SMALL.vocab_size, activation="gelu_new")
"""What a 2019 file does not say."""
PIPELINED = [("transformer", 2.0), ("encoder", 3.0), ("core", 3.0), ("folded", 3.0)]
CORE = Layout("core", 3.0, tensor=2, pipeline=2)
FILES, LAST = "mp_rank_*/*", "mp_rank_01_001"


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


def test_optimizers_and_random_states_are_no_obstacle(made: Made) -> None:
    def add_states(content: dict[str, Any]) -> None:
        groups: defaultdict[str, Any] = defaultdict(list, params=[torch.zeros(4)])
        content["optimizer"] = {"fp32_from_fp16": [[torch.ones(5)]], "groups": groups}
        content["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]

    folder = made(CORE)
    inside(FILES, add_states)(folder)
    source = open_folder(folder, Options())
    assert_equal(merged(source), truth())
    assert not source.has_moments("adamw")


def test_a_head_whose_values_differ_is_untied(made: Made) -> None:
    model = replace(SMALL, tied=False)
    layout = replace(CORE, model=model, args={"num_attention_heads": 8, "vocab_size": 300})
    source = open_folder(made(layout), Options(activation="gelu_new"))
    assert source.model == model and len(source.notes) == 1


def test_heads_are_64_wide_if_nothing_says_otherwise(made: Made) -> None:
    model = Architecture(n_layer=1, n_head=2, n_embd=128, n_positions=2, n_inner=8, vocab_size=256)
    source = open_folder(made(Layout(tensor=2, model=model)), Options())
    assert source.model == model and len(source.notes) == 2  # heads and activation are assumed
    refused(made(Layout(), "b"), "--num-heads")
    intact = made(Layout("core", 3.0), "c")
    refused(intact, "--vocab-size", "385", "384 rows", vocab_size=385)
    assert open_folder(intact, Options(vocab_size=384)).model.vocab_size == 384


def test_the_qkv_version_is_recorded_or_given_and_never_guessed(made: Made) -> None:
    nested = made(Layout("transformer", None, 2), "nested")
    refused(nested, "give --qkv-version")
    assert_equal(merged(open_folder(nested, Options(qkv_version=0))), truth())
    recorded = made(Layout("transformer", 1, 2), "recorded")
    refused(recorded, "checkpoint_version is 1", "--qkv-version is 0", qkv_version=0)
    fork = made(Layout("2019", 2.0, 2), "fork")
    assert_equal(merged(open_folder(fork, replace(UNRECORDED, qkv_version=2))), truth())
    refused(made(Layout("core", 4.0), "fourth"), "checkpoint_version is 4.0")


def test_the_folders_name_says_the_iteration_of_its_files(made: Made) -> None:
    refused(made(CORE, "iter_0000200"), "iteration 100", "iter_0000100")
    assert open_folder(made(CORE, "release"), Options()).iteration == 100
    assert open_folder(made(replace(CORE, iteration=None), "iter_0000300"), Options()).iteration == 300


Change = Callable[[Any], object]


def said(files: str, **args: Any) -> Change:
    return inside(files, lambda content: vars(content["args"]).update(args))


def in_last(change: Change) -> Change:
    return inside(f"{LAST}/*", change)


def without(*folders: str) -> Change:
    return lambda folder: [shutil.rmtree(folder / name) for name in folders]


def renumbered(content: dict[str, Any]) -> None:
    """The layers 0 and 1 of the stage become 3 and 4; 2 and 3 would be those of the model."""
    for key in [key for key in content["model"] if "layers." in key]:
        number = int(key.split(".")[2])
        content["model"][key.replace(f".{number}.", f".{number + 3}.", 1)] = content["model"].pop(key)


FC2, FC1 = "decoder.layers.1.mlp.linear_fc2.bias", "decoder.layers.1.mlp.linear_fc1.bias"
ROUTER, FOUR = "decoder.layers.1.mlp.router.weight", replace(CORE, tensor=4)
WRONG: list[tuple[Layout, Change, list[str]]] = [
    (CORE, said(FILES, tensor_model_parallel_size=4), ["mp_rank_02_000", "4 tensor ranks"]),
    (CORE, said(FILES, pipeline_model_parallel_size=3), ["mp_rank_00_002", "3 pipeline ranks"]),
    (CORE, said(FILES, virtual_pipeline_model_parallel_size=2), ["virtual_pipeline_model_parallel_size is 2"]),
    (CORE, said(FILES, num_layers=6), ["args.num_layers is 6", "have 4"]),
    (CORE, said(FILES, num_attention_heads=5, kv_channels=None), ["5 heads"]),
    (CORE, in_last(lambda content: content.update(iteration=200)), ["iteration is 200", "100"]),
    (CORE, in_last(lambda content: content.update(checkpoint_version=2.0)), ["checkpoint_version is 2.0", "3.0"]),
    (CORE, said(f"{LAST}/*", num_attention_heads=4), ["num_attention_heads is 4"]),
    (CORE, said(f"{LAST}/*", tensor_model_parallel_size=4), [LAST, "size is 4", "has 2"]),
    (CORE, in_last(lambda content: content["model"].pop(FC2)), ["stage 1", "'h.3.mlp.c_proj.bias'", "tensor rank 1"]),
    (CORE, in_last(lambda content: content["model"].update({FC2: torch.zeros(33)})), ["c_proj.bias'", "[33]", "[32]"]),
    (CORE, in_last(lambda content: content["model"].update({FC1: torch.ones(64).half()})), ["c_fc.bias'", "float16"]),
    (CORE, in_last(lambda content: content["model"].update({ROUTER: torch.zeros(3)})), [LAST, repr(ROUTER)]),
    (
        CORE,
        in_last(lambda content: content.update(dict.fromkeys(("model0", "model1"), content.pop("model")))),
        [LAST, "is (2,"],
    ),
    (CORE, inside("mp_rank_*_001/*", renumbered), ["mp_rank_00_001", "[3, 4]"]),
    (FOUR, without("mp_rank_03_001"), ["mp_rank_03_001"]),
    (FOUR, without("mp_rank_03_001", "mp_rank_03_000"), ["mp_rank_03_000", "4 tensor ranks"]),
    (CORE, lambda folder: shutil.copytree(folder / LAST, folder / "mp_rank_01"), ["mp_rank_01_000", "same rank"]),
    (Layout(tensor=4), without("mp_rank_03"), ["mp_rank_03", "4 tensor ranks"]),  # shows in the shapes
    (Layout(pipeline=2), without("mp_rank_00_001"), ["'ln_f.bias'"]),
]


@pytest.mark.parametrize(("layout", "change", "parts"), WRONG, ids=[" ".join(parts) for *_, parts in WRONG])
def test_files_that_do_not_belong_together_are_refused_by_name(
    layout: Layout, change: Change, parts: list[str], made: Made
) -> None:
    folder = made(layout)
    change(folder)
    refused(folder, *parts, **({"num_heads": 8} if layout.names == "2019" else {}))


@pytest.mark.parametrize(
    ("order", "recorded", "one", "other", "named"),
    [
        ("data ranks first", {"world_size": 12}, "00_000", "01_000", "rank 3, which is tensor rank 1 of"),
        ("data ranks first", {"world_size": 12}, "01_000", "01_001", "is tensor rank 1 of pipeline stage 1, but"),
        ("data ranks first", {}, "01_000", "00_000", "rank 3, which is tensor rank 1 of"),
        ("stages first", {"use_tp_pp_dp_mapping": True, "world_size": 12}, "00_000", "00_001", "pipeline stage 1, but"),
    ],
)
def test_folders_of_ranks_that_were_exchanged_are_refused_by_name(
    order: str, recorded: dict[str, Any], one: str, other: str, named: str, made: Made
) -> None:
    """Of a training on 3 data ranks, each file saved by another of them."""
    folder = made(CORE)
    for rank, stage in product(range(2), repeat=2):
        data = (stage + rank) % 3
        own = data + 3 * stage if order == "data ranks first" else stage + 2 * data
        said(f"mp_rank_{rank:02}_{stage:03}/*", rank=rank + 2 * own, **recorded)(folder)
    assert_equal(merged(open_folder(folder, Options())), truth())
    exchange(folder / f"mp_rank_{one}", folder / f"mp_rank_{other}")
    refused(folder, f"mp_rank_{min(one, other)}", named)
