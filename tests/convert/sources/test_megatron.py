"""Megatron-LM's mp_rank_* files of every age become whole tensors in our order, or one line."""

import math
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import CheckpointError
from convert.assemble import HUGGING_FACE, assemble
from convert.sources.megatron import matches, open_folder
from convert.sources.options import Options
from convert.sources.source import Architecture, Source
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.megatron_files import Layout, folder_name, padded, recorded_args, save, write

UNRECORDED = Options(num_heads=SMALL.n_head, vocab_size=SMALL.vocab_size, activation="gelu_new")
"""What a 2019 file does not say."""
FORMATS = [
    ("2019", None),
    ("transformer", 0),
    ("transformer", 1),
    ("transformer", 2.0),
    ("encoder", 3.0),
    ("core", 3.0),
    ("folded", 3.0),
]
CORE = Layout("core", 3.0, tensor=2, pipeline=2)


def options_for(layout: Layout) -> Options:
    return UNRECORDED if layout.names == "2019" else Options()


def merged(source: Source) -> dict[str, Tensor]:
    return {name: assemble(source, name) for name in source.tensors}


def error_of(folder: Path, options: Options | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder, options or Options())
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message.replace(str(folder), "ITER")


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize(("names", "version"), FORMATS)
def test_every_format_is_read_bit_by_bit(
    names: str, version: float | None, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    layout = Layout(names, version, tensor, pipeline, dtype=torch.float16)
    folder = write(tmp_path / "iter_0000100", layout)
    assert matches(folder)
    source = open_folder(folder, options_for(layout))
    assert source.model == SMALL
    assert (source.iteration, len(source.files), source.notes) == (100, tensor * pipeline, ())
    assert source.tensors["wte.weight"].shape == (padded(SMALL, tensor), 32)
    assert_equal(merged(source), {name: whole.half() for name, whole in truth().items()})


@pytest.mark.parametrize(("names", "version"), [*FORMATS[3:5], *FORMATS[5:]])
@pytest.mark.parametrize(
    ("chunks", "counts", "numbered_globally"),
    [(2, (), False), (1, (3, 1), False), (2, (0, 2, 1, 1), False), (1, (), True), (2, (), True), (1, (1, 3), True)],
)
def test_interleaved_and_uneven_stages_keep_the_order_of_layers(
    names: str, version: float, chunks: int, counts: tuple[int, ...], numbered_globally: bool, tmp_path: Path
) -> None:
    layout = Layout(names, version, 2, 2, chunks, counts, numbered_globally)
    source = open_folder(write(tmp_path / "iter_0000100", layout), Options())
    assert_equal(merged(source), truth())
    assert ("2 models per stage" in source.layout) == (chunks == 2)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_split_files_joined_again_are_the_model(data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from([1, 2, 4]))
    heads = tensor * data.draw(st.integers(1, 2))
    width = heads * data.draw(st.sampled_from([1, 2, 3, 5]))
    pipeline, chunks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    if pipeline == 1:
        chunks = 1
    total = pipeline * chunks
    counts = tuple(data.draw(st.integers(0 if 0 < total - 1 == index else 1, 2)) for index in range(total))
    model = Architecture(
        n_layer=sum(counts),
        n_head=heads,
        n_embd=width,
        n_positions=data.draw(st.integers(1, 5)),
        n_inner=tensor * data.draw(st.integers(1, 9)),
        vocab_size=data.draw(st.integers(1, 400)),
        tied=True,
    )
    names, version = data.draw(st.sampled_from(FORMATS if pipeline == 1 else FORMATS[3:]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    untied = names in ("encoder", "core", "folded") and data.draw(st.booleans())
    model = replace(model, tied=not untied)
    layout = Layout(names, version, tensor, pipeline, chunks, counts, data.draw(st.booleans()), model, dtype)
    if names != "2019":
        layout = replace(layout, args=recorded_args(layout) | {"untie_embeddings_and_output_weights": untied})
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), layout)
        source = open_folder(Path(folder), Options(num_heads=heads, vocab_size=model.vocab_size))
        assert source.model == model
        whole = {name: tensor.to(dtype) for name, tensor in truth(model).items()}
        assert_equal(merged(source), whole, model)
        theirs = assemble(source, "h.0.attn.c_attn.weight", qkv=HUGGING_FACE, conv1d=True)
        ours = whole["h.0.attn.c_attn.weight"].view(heads, 3, -1, width).transpose(0, 1).reshape(3 * width, width)
        assert torch.equal(theirs, ours.t())


@pytest.mark.parametrize("new_format", [False, True])
def test_random_states_foreign_optimizers_and_tensors_of_gpus_are_no_obstacle(new_format: bool, tmp_path: Path) -> None:
    for layout in (Layout(tensor=2, extras=True), replace(CORE, extras=True)):
        layout = replace(layout, new_format=new_format)
        source = open_folder(write(tmp_path / layout.names, layout, location="cuda:0"), options_for(layout))
        assert_equal(merged(source), truth())
        assert source.notes == ("optimizer state is stored by index, not by name: left out",)
        assert not source.moments


def test_the_distributed_optimizers_files_are_ignored(tmp_path: Path) -> None:
    folder = write(tmp_path / "of 2022", Layout("encoder", 3.0, 2, file_name="model_rng.pt"))
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        (folder / name).mkdir()
        (folder / name / "optim.pt").write_bytes(b"not read")
    newer = write(tmp_path / "newer", CORE)
    (newer / "mp_rank_01_001" / "distrib_optim.pt").write_bytes(b"not read")
    for path in (folder, newer):
        source = open_folder(path, Options())
        assert_equal(merged(source), truth())
        assert len(source.notes) == 1 and "left out" in source.notes[0]


def test_a_layout_is_said_in_one_line(tmp_path: Path) -> None:
    old = open_folder(write(tmp_path / "old", Layout(tensor=2)), UNRECORDED)
    assert old.layout == (
        "Megatron-LM (2019 names), 4 layers, tensor 2 x pipeline 1, "
        "qkv rows [(q, k, v), head, dim] per rank (version 0)"
    )
    new = open_folder(write(tmp_path / "new", replace(CORE, names="folded")), Options())
    assert new.layout == (
        "Megatron-LM (core names, folded norms), 4 layers, tensor 2 x pipeline 2, "
        "qkv rows [head, (q, k, v), dim] (version 3)"
    )
    assert new.facts["checkpoint_version"] == 3.0
    assert new.facts["args"]["hidden_size"] == 32
    assert new.consumed_samples == 6400


def test_names_of_september_2023_are_read(tmp_path: Path) -> None:
    def rename(stage: int, rank: int, content: dict[str, Any]) -> None:
        part = content["model"]["language_model"]
        part["encoder"] = {key.replace("layernorm", "norm"): value for key, value in part["encoder"].items()}

    folder = write(tmp_path / "iter_0000100", Layout("encoder", 3.0, 2, 2, edit=rename))
    assert_equal(merged(open_folder(folder, Options())), truth())


def test_arguments_as_a_dict_and_total_iters_are_read(tmp_path: Path) -> None:
    def older(stage: int, rank: int, content: dict[str, Any]) -> None:
        content["args"] = vars(content["args"])
        content["total_iters"] = content.pop("iteration")

    source = open_folder(write(tmp_path / "release", replace(CORE, edit=older)), Options())
    assert (source.iteration, source.model) == (100, SMALL)


def test_drift_of_replicated_tensors_is_kept_as_copies(tmp_path: Path) -> None:
    def drift(stage: int, rank: int, content: dict[str, Any]) -> None:
        if (stage, rank) == (1, 1):
            content["model"]["decoder.layers.0.input_layernorm.weight"][3] += 0.25
            content["model"]["output_layer.weight"][7, 1] += 0.5

    source = open_folder(write(tmp_path / "iter_0000100", replace(CORE, edit=drift)), Options())
    assert_equal(merged(source), truth())  # rank 0 is used
    norm = source.tensors["h.2.ln_1.weight"]
    assert list(norm.copies) == ["tensor rank 1"]
    copy = norm.copies["tensor rank 1"].blocks[0].tensor.read()
    assert (copy - truth()["h.2.ln_1.weight"]).tolist() == pytest.approx([0.25 * (i == 3) for i in range(32)])
    head = source.tensors["wte.weight"].copies["output_layer"]
    for wte, tied, expected in zip(source.tensors["wte.weight"].blocks, head.blocks, (0, 0.5), strict=True):
        assert (tied.tensor.read() - wte.tensor.read()).abs().max() == expected


@pytest.mark.parametrize("names", ["2019", "encoder", "core"])
def test_the_last_stages_embedding_is_a_copy(names: str, tmp_path: Path) -> None:
    layout = Layout(names, 3.0, 2, 2, args={})
    source = open_folder(write(tmp_path / "iter_0000100", layout), UNRECORDED)
    assert source.model.tied and "lm_head.weight" not in source.tensors
    assert source.notes == ()
    copies = source.tensors["wte.weight"].copies
    assert list(copies) == (
        [] if names == "2019" else ["pipeline stage 1, head" if names == "encoder" else "output_layer"]
    )
    assert all(copy.shape == source.tensors["wte.weight"].shape for copy in copies.values())


def test_a_head_is_untied_if_args_say_so_or_its_values_differ(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False)
    for said in ({"untie_embeddings_and_output_weights": True}, {}):
        layout = replace(CORE, model=model)
        layout = replace(layout, args={"num_attention_heads": 8, "vocab_size": 300} | said)
        source = open_folder(write(tmp_path / str(len(said)), layout), Options(activation="gelu_new"))
        assert source.model == model
        assert_equal(merged(source), truth(model), model)
        assert source.notes == (() if said else ("the head differs from the token embedding: taken as not tied",))


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"layernorm_epsilon": 1e-6}, "layer_norm_epsilon", 1e-6),
        ({"layernorm_epsilon": None, "norm_epsilon": 1e-6}, "layer_norm_epsilon", 1e-6),
        ({"hidden_dropout": 0.0}, "dropout", 0.0),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "activation", "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": False}, "activation", "gelu"),
        ({"num_experts": [1], "group_query_attention": True, "num_query_groups": 8}, "n_head", 8),
        ({"vocab_size": None}, "vocab_size", 512),
        ({"vocab_size": 299, "tokenizer_type": "NullTokenizer"}, "vocab_size", 300),
        ({"num_attention_heads": None, "kv_channels": None}, "n_head", 4),
    ],
)
def test_what_args_say_about_the_model(said: dict[str, Any], field: str, value: Any, tmp_path: Path) -> None:
    layout = replace(CORE, args=recorded_args(CORE) | said)
    options = Options(num_heads=4 if field == "n_head" and value == 4 else None)
    source = open_folder(write(tmp_path / "iter_0000100", layout), options)
    assert source.model == replace(SMALL, **{field: value})
    assert bool(source.notes) == (value == "gelu")


def test_before_september_2020_gelu_was_exact_unless_args_say_openai(tmp_path: Path) -> None:
    layout = Layout("transformer", 0, 2)
    for openai, activation in ((False, "gelu"), (True, "gelu_new")):
        said = {key: value for key, value in recorded_args(layout).items() if key != "bias_gelu_fusion"}
        folder = write(tmp_path / str(openai), replace(layout, args=said | {"openai_gelu": openai}))
        assert open_folder(folder, Options()).model.activation == activation


def test_the_activation_flag_decides(tmp_path: Path) -> None:
    layout = replace(CORE, args=recorded_args(CORE) | {"bias_gelu_fusion": False})
    source = open_folder(write(tmp_path / "iter_0000100", layout), Options(activation="gelu_new"))
    assert (source.model.activation, source.notes) == ("gelu_new", ())


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [128, 1000])
def test_gpt2s_vocabulary_is_recognised_by_its_padded_rows(step: int, tensor: int, tmp_path: Path) -> None:
    model = Architecture(n_layer=1, n_head=8, n_embd=8, n_positions=2, n_inner=8, vocab_size=50257)
    layout = Layout("core", 3.0, tensor, model=model, dtype=torch.float16)
    rows = math.ceil(50257 / (step * tensor)) * step * tensor
    said = recorded_args(layout) | {"vocab_size": None, "make_vocab_size_divisible_by": step}

    def pad(stage: int, rank: int, content: dict[str, Any]) -> None:
        content["model"]["embedding.word_embeddings.weight"] = torch.zeros(rows // tensor, 8).half()

    source = open_folder(write(tmp_path / "iter_0000100", replace(layout, args=said, edit=pad)), Options())
    assert source.tensors["wte.weight"].shape == (rows, 8)
    assert source.model.vocab_size == 50257


def test_heads_are_64_wide_if_nothing_says_otherwise(tmp_path: Path) -> None:
    model = Architecture(n_layer=1, n_head=2, n_embd=128, n_positions=2, n_inner=8, vocab_size=256)
    source = open_folder(write(tmp_path / "a", Layout(tensor=2, model=model)), Options())
    assert source.model == model
    assert source.notes == (
        "heads are not recorded: 2 of 64 assumed (--num-heads decides)",
        "activation is not recorded: gelu_new (tanh) assumed (--activation decides)",
    )
    assert "no multiple of 64; give --num-heads" in error_of(write(tmp_path / "b", Layout()))


def test_the_qkv_version_is_recorded_or_given_and_never_lose(tmp_path: Path) -> None:
    nested = write(tmp_path / "nested", Layout("transformer", None, 2))
    assert "the order of its qkv rows is unknown; give --qkv-version" in error_of(nested)
    assert_equal(merged(open_folder(nested, Options(qkv_version=0))), truth())
    recorded = write(tmp_path / "recorded", Layout("transformer", 1, 2))
    assert error_of(recorded, Options(qkv_version=0)) == (
        "ITER/mp_rank_00/model_optim_rng.pt: checkpoint_version is 1, but --qkv-version 0; leave the flag out"
    )
    assert_equal(merged(open_folder(recorded, Options(qkv_version=1))), truth())
    third = write(tmp_path / "third", Layout("core", 3.0))
    assert_equal(merged(open_folder(third, Options(qkv_version=2))), truth())  # the same order
    fork = write(tmp_path / "fork", Layout("2019", 2.0, 2))
    fork_options = replace(UNRECORDED, qkv_version=2)
    assert_equal(merged(open_folder(fork, fork_options)), truth())
    assert "checkpoint_version 4.0 is unknown; 0 to 3 can be read" in error_of(
        write(tmp_path / "4", Layout("core", 4.0))
    )


def test_the_folders_name_says_the_iteration_of_its_files(tmp_path: Path) -> None:
    assert error_of(write(tmp_path / "iter_0000200", CORE)) == (
        "ITER: its files are of iteration 100; rename it to iter_0000100 if nothing is missing"
    )
    assert open_folder(write(tmp_path / "release", CORE), Options()).iteration == 100
    assert open_folder(write(tmp_path / "iter_0000300", replace(CORE, iteration=None)), Options()).iteration == 300


REFUSED_ARGS: list[tuple[dict[str, Any], str]] = [
    ({"swiglu": True}, "args.swiglu is True: the model is no GPT-2"),
    ({"squared_relu": True}, "args.squared_relu is True"),
    ({"position_embedding_type": "rope"}, "args.position_embedding_type is 'rope'"),
    ({"position_embedding_type": "none"}, "args.position_embedding_type is 'none'"),
    ({"add_position_embedding": False}, "args.add_position_embedding is False"),
    ({"use_rotary_position_embeddings": True}, "args.use_rotary_position_embeddings is True"),
    ({"normalization": "RMSNorm"}, "args.normalization is 'RMSNorm'"),
    ({"num_experts": 8}, "args.num_experts is 8"),
    ({"group_query_attention": True, "num_query_groups": 2}, "args.group_query_attention with 2 groups"),
    ({"apply_residual_connection_post_layernorm": True}, "args.apply_residual_connection_post_layernorm is True"),
    ({"apply_layernorm_1p": True}, "args.apply_layernorm_1p is True"),
    ({"kv_channels": 8}, "args.kv_channels is 8: 8 heads of that size are no GPT-2 of width 32"),
    ({"add_bias_linear": False}, "args.add_bias_linear is False"),
    ({"tensor_model_parallel_size": 4}, "mp_rank_02_000 is missing: args tell of 4 tensor ranks, and there are 2"),
    ({"tensor_model_parallel_size": 1}, "mp_rank_01_000 does not belong to it: args tell of 1 tensor ranks"),
    ({"pipeline_model_parallel_size": 3}, "mp_rank_00_002 is missing: args tell of 3 pipeline ranks, and there are 2"),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size is 2, but it has 1 models",
    ),
    ({"num_layers": 6}, "args.num_layers is 6, but the tensors have 4"),
    ({"num_attention_heads": 5, "kv_channels": None}, "5 heads do not divide a width of 32 over 2 tensor ranks"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED_ARGS)
def test_what_is_no_gpt2_or_has_lost_ranks_is_refused(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "iter_0000100", replace(CORE, args=recorded_args(CORE) | said))
    assert message in error_of(folder)


def change(edit: Callable[[dict[str, Any]], object], name: str = "mp_rank_01_001") -> Callable[[Path], object]:
    """Edit the content of one rank's file."""

    def apply(folder: Path) -> None:
        path = folder / name / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        edit(content)
        save(content, path)

    return apply


def cut(share: float) -> Callable[[Path], object]:
    """Keep a share of the last file."""

    def apply(folder: Path) -> None:
        path = folder / LAST / FILE
        os.truncate(path, int(path.stat().st_size * share))

    return apply


def set_tensor(name: str, value: Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].update({name: value})


FC2 = "decoder.layers.1.mlp.linear_fc2.bias"
FC1 = "decoder.layers.1.mlp.linear_fc1.bias"
WPE = "embedding.position_embeddings.weight"
LAST, FILE = "mp_rank_01_001", "model_optim_rng.pt"
BAD = f"ITER/{LAST}/{FILE}: "


def lose(*names: str) -> Callable[[Path], object]:
    """Remove ranks' folders."""

    def apply(folder: Path) -> None:
        for name in names:
            shutil.rmtree(folder / name)

    return apply


def copy_last(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copytree(folder / LAST, folder / name)


def move_models(content: dict[str, Any], *names: str) -> None:
    model = content.pop("model")
    content.update(dict.fromkeys(names, model))


DAMAGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("a lost last tensor rank", lose("mp_rank_01_000", LAST), "mp_rank_01_000 is missing: args tell of 2"),
    ("a lost last stage", lose("mp_rank_00_001", LAST), "mp_rank_00_001 is missing: args tell of 2"),
    ("a lost first rank", lose("mp_rank_00_000", "mp_rank_00_001"), "ITER/mp_rank_00_000: is missing"),
    ("a lost file", lambda folder: (folder / LAST / FILE).unlink(), f"ITER/{LAST}: model_optim_rng.pt is missing"),
    ("one lost folder", lose(LAST), f"ITER/{LAST}: is missing, but ranks after it are there"),
    ("two forms of names", copy_last("mp_rank_01"), "are of two checkpoints; move one away"),
    ("two of one rank", copy_last("mp_rank_01_0001"), "are of two checkpoints; move one away"),
    (
        "two files",
        lambda folder: shutil.copy(folder / LAST / FILE, folder / LAST / "model_rng.pt"),
        "has model_optim_rng.pt and model_rng.pt",
    ),
    ("ranks of experts", copy_last("mp_rank_01_001_000"), "mp_rank_01_001_000: ranks of experts"),
    ("another iteration", change(lambda content: content.update(iteration=200)), f"{BAD}iteration is 200, but 100 in"),
    (
        "another version",
        change(lambda content: content.update(checkpoint_version=2.0)),
        "checkpoint_version is 2.0, but 3.0 in",
    ),
    (
        "other heads",
        change(lambda content: setattr(content["args"], "num_attention_heads", 4)),
        "args.num_attention_heads is 4, but 8 in",
    ),
    (
        "a missing tensor",
        change(lambda content: content["model"].pop(FC2)),
        "ITER: pipeline stage 1: tensor 'h.3.mlp.c_proj.bias' is missing from tensor rank 1",
    ),
    (
        "an additional tensor",
        change(lambda content: content["model"].pop(WPE), "mp_rank_00_000"),
        "tensor 'wpe.weight' is missing from tensor rank 0",
    ),
    (
        "another shape",
        change(set_tensor(FC2, torch.zeros(33))),
        "tensor 'h.3.mlp.c_proj.bias' has shape [33] on tensor rank 1 and [32] on rank 0",
    ),
    (
        "another type",
        change(set_tensor(FC1, torch.zeros(64).half())),
        "tensor 'h.3.mlp.c_fc.bias' is of float16, float32 over its ranks",
    ),
    (
        "an unknown tensor",
        change(set_tensor("decoder.layers.1.mlp.router.weight", torch.zeros(3))),
        f"{BAD}unknown tensor 'decoder.layers.1.mlp.router.weight': no GPT-2",
    ),
    (
        "a stacked tensor",
        change(set_tensor("decoder.layers.mlp.linear_fc2.bias", torch.zeros(3))),
        "is no tensor of one of Megatron-LM's layers",
    ),
    (
        "a name twice",
        change(set_tensor("decoder.layers.1.mlp.dense_4h_to_h.bias", torch.zeros(32))),
        "which are the same tensor",
    ),
    ("no tensor", change(lambda content: content["model"].update({FC2: 3})), f"{BAD}{FC2!r} is no tensor"),
    (
        "a gap in the layers",
        change(
            lambda content: content["model"].update({FC2.replace(".1.", ".3."): content["model"].pop(FC2)}),
            "mp_rank_00_001",
        ),
        "has the layers 0, 1, 3; expected 0, 1, … or 2, 3, …",
    ),
    ("no model", change(lambda content: content.pop("model")), f"{BAD}has no `model`; expected `model`, or"),
    ("an empty model", change(lambda content: content["model"].clear()), f"{BAD}a `model` in it is empty"),
    ("models with a gap", change(lambda content: move_models(content, "model1")), "has model1; expected `model`, or"),
    (
        "more models",
        change(lambda content: move_models(content, "model0", "model1")),
        "the number of interleaved models is 2, but 1 in",
    ),
    ("no dict", lambda folder: save([1], folder / LAST / FILE), f"{BAD}not a checkpoint of Megatron-LM"),
    ("half a file", cut(0.5), f"{BAD}damaged or cut off (archive: "),
    ("an empty file", cut(0), f"{BAD}damaged or cut off"),
    ("no pickle", lambda folder: (folder / LAST / FILE).write_text("<html>"), f"{BAD}cannot be read safely"),
]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("intact") / "iter_0000100", CORE)


@pytest.mark.parametrize(("name", "spoil", "message"), DAMAGED, ids=[name for name, _, _ in DAMAGED])
def test_damage_gives_one_line_that_names_the_file(
    name: str, spoil: Callable[[Path], object], message: str, intact: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "iter_0000100"
    shutil.copytree(intact, folder)
    assert open_folder(folder, Options()).model == SMALL
    spoil(folder)
    assert message in error_of(folder)


def test_a_head_that_args_call_untied_must_be_there(tmp_path: Path) -> None:
    layout = Layout("encoder", 3.0)
    layout = replace(layout, args=recorded_args(layout) | {"untie_embeddings_and_output_weights": True})
    assert "output_layer.weight is absent" in error_of(write(tmp_path / "iter_0000100", layout))


def test_a_lost_last_rank_of_2019_shows_in_the_shapes(tmp_path: Path) -> None:
    folder = write(tmp_path / "iter_0000100", Layout(tensor=4))
    shutil.rmtree(folder / "mp_rank_03")
    assert error_of(folder, UNRECORDED) == (
        "ITER: mp_rank_03 is missing: the shapes tell of 4 tensor ranks, and there are 3"
    )
    folder = write(tmp_path / "half", Layout(tensor=2, pipeline=2))
    for rank in (0, 1):
        shutil.rmtree(folder / f"mp_rank_0{rank}_001")
    assert error_of(folder, UNRECORDED) == "ITER: tensor 'ln_f.bias' is missing (and 1 more)"


def test_flags_that_contradict_the_checkpoint_are_refused(intact: Path) -> None:
    assert error_of(intact, Options(num_heads=4)).endswith("--num-heads is 4, but args.num_attention_heads is 8")
    assert "--vocab-size 513: the embedding has 512 rows" in error_of(intact, Options(vocab_size=513))
    assert open_folder(intact, Options(vocab_size=299)).model.vocab_size == 299


class Plant:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.planted = (function, arguments)

    def __reduce__(self) -> Any:
        return self.planted


@pytest.mark.parametrize("new_format", [False, True])
@pytest.mark.parametrize("function", [os.system, open, exec, shutil.rmtree])
def test_a_planted_pickle_never_runs(function: Callable[..., object], new_format: bool, tmp_path: Path) -> None:
    target = tmp_path / "planted"
    victim = tmp_path / "victim"
    victim.mkdir()
    argument = {
        os.system: (f"touch {target}",),
        open: (str(target), "w"),
        exec: (f"open({str(target)!r}, 'w')",),
        shutil.rmtree: (str(victim),),
    }[function]

    def plant(stage: int, rank: int, content: dict[str, Any]) -> None:
        content["args"] = Namespace(num_attention_heads=8, hook=Plant(function, *argument))
        content["optimizer"] = {"planted": Plant(function, *argument)}

    folder = write(tmp_path / "iter_0000100", replace(CORE, edit=plant, new_format=new_format))
    if function is os.system:  # PyTorch refuses the whole file
        assert "cannot be read safely" in error_of(folder)
    else:  # an object that does nothing
        source = open_folder(folder, Options())
        assert_equal({name: tensor[:300] for name, tensor in merged(source).items()}, truth())
    assert not target.exists() and victim.exists()


def test_a_fixture_has_the_folders_that_the_layout_table_names() -> None:
    assert folder_name(Layout(tensor=2), 0, 1) == "mp_rank_01"
    assert folder_name(CORE, 1, 0) == "mp_rank_00_001"
