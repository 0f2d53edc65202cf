"""DeepSpeed's checkpoints: every ZeRO stage, tensor ranks, pipelines, both families of names, and damaged folders."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.assemble import assemble, read_sharded
from convert.files.stored import StoredPieces, StoredTensor
from convert.sources.deepspeed import matches, open_folder
from convert.sources.options import Options
from convert.sources.source import QKV, Source
from tests.convert.deepspeed_files import (
    ITERATION,
    SAMPLES,
    STEP,
    Run,
    deepspeed_classes,
    edit,
    partition,
    rank_tensors,
    rounded,
    weights,
    write_layers,
    write_tag,
)
from tests.convert.encoded import SMALL, assert_equal, truth

HEADS = Options(num_heads=SMALL.n_head)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def opened(tmp_path: Path, run: Run, options: Options = HEADS) -> Source:
    return open_folder(write_tag(tmp_path / "global_step120", run), options)


@pytest.mark.parametrize("names", ["transformers", "megatron"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_weights_of_every_layout(tmp_path: Path, stage: int, tensor: int, names: str) -> None:
    data = 1 + (stage + tensor + (names == "megatron")) % 3
    source = opened(tmp_path, Run(stage, tensor, data, names))
    assert matches(source.path)
    assert_equal(weights(source), truth())
    family = "Megatron" if names == "megatron" else "transformers"
    assert source.layout == (
        f"DeepSpeed 0.19.8, ZeRO {stage} over {data} data ranks, tensor {tensor}, names of {family}, float32 masters"
    )


def test_moments_step_progress_and_files(tmp_path: Path) -> None:
    source = opened(tmp_path, Run(2, tensor=2, data=3, names="megatron"))
    for kind, factor in (("exp_avg", -1.0), ("exp_avg_sq", 0.25)):
        found = {name: assemble(source, name, tensor=tensor) for name, tensor in source.moments[kind].items()}
        assert_equal(found, {name: tensor * factor for name, tensor in truth().items()})
    assert (source.step, source.iteration, source.consumed_samples) == (STEP, ITERATION, SAMPLES)
    assert len(source.files) == 2 + 2 * 3
    assert source.model == SMALL


def test_moments_of_stage_3(tmp_path: Path) -> None:
    source = opened(tmp_path, Run(3, data=3))
    found = {name: assemble(source, name, tensor=tensor) for name, tensor in source.moments["exp_avg"].items()}
    assert_equal(found, {name: -tensor for name, tensor in truth().items()})
    assert source.step == STEP


@pytest.mark.parametrize("names", ["transformers", "megatron"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_without_zero_the_weights_of_the_model_files_are_read(tmp_path: Path, tensor: int, names: str) -> None:
    source = opened(tmp_path, Run(0, tensor, names=names))
    assert_equal(weights(source), rounded())
    assert source.layout.endswith("bfloat16 weights")
    assert not source.moments and source.step is None


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_order_of_qkv_rows(tmp_path: Path, tensor: int, version: int) -> None:
    source = opened(tmp_path, Run(1, tensor, names="megatron", version=version))
    assert source.qkv == QKV(version, tensor)
    assert_equal(weights(source), truth())


def test_names_of_2019_without_a_version_are_version_0(tmp_path: Path) -> None:
    source = opened(tmp_path, Run(1, tensor=2, names="2019"), replace(HEADS, vocab_size=SMALL.vocab_size))
    assert source.qkv == QKV(0, 2)
    assert_equal(weights(source), truth())


def test_names_of_megatron_without_a_version_need_the_option(tmp_path: Path) -> None:
    run = Run(1, tensor=2, names="megatron", version=None)
    with pytest.raises(CheckpointError, match=r"global_step120: .*not recorded.*give --qkv-version"):
        opened(tmp_path, run)
    source = open_folder(tmp_path / "global_step120", replace(HEADS, qkv_version=2))
    assert source.qkv == QKV(2)


def test_an_option_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "megatron", Run(1, names="megatron"))
    with pytest.raises(CheckpointError, match="--qkv-version is 0, but checkpoint_version is 2"):
        open_folder(tmp_path / "megatron" / "global_step120", replace(HEADS, qkv_version=0))
    with pytest.raises(CheckpointError, match=r"--num-heads is 4, but args.num_attention_heads is 8"):
        open_folder(tmp_path / "megatron" / "global_step120", Options(num_heads=4))
    opened(tmp_path / "transformers", Run(1))
    with pytest.raises(CheckpointError, match="--qkv-version 2: names of transformers mean version 0"):
        open_folder(tmp_path / "transformers" / "global_step120", replace(HEADS, qkv_version=2))


def test_heads_come_from_the_arguments(tmp_path: Path) -> None:
    source = opened(tmp_path, Run(1, names="megatron"), Options())
    assert source.model == SMALL
    assert not source.notes


def test_heads_that_nothing_says_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"heads is not recorded.*--num-heads"):
        opened(tmp_path, Run(1), Options())


@pytest.mark.parametrize("place", ["global_step120/config.json", "config.json"])
def test_a_config_beside_the_tag_is_used(tmp_path: Path, place: str) -> None:
    folder = write_tag(tmp_path / "global_step120", Run(2))
    config = {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 8,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-6,
    }
    (tmp_path / place).write_text(json.dumps(config))
    source = open_folder(folder, Options())
    assert source.model == replace(SMALL, activation="gelu", layer_norm_epsilon=1e-6)
    assert open_folder(folder, Options(activation="gelu_new")).model.activation == "gelu_new"
    with pytest.raises(CheckpointError, match=r"--num-heads is 4, but n_head is 8 in .*config.json"):
        open_folder(folder, Options(num_heads=4))
    (tmp_path / place).write_text(json.dumps({**config, "n_layer": 5}))
    with pytest.raises(CheckpointError, match=r"config.json: n_layer is 5, but 4 in the tensors"):
        open_folder(folder, Options())
    (tmp_path / place).write_text(json.dumps({**config, "scale_attn_by_inverse_layer_idx": True}))
    with pytest.raises(CheckpointError, match=r"config.json: scale_attn_by_inverse_layer_idx is True"):
        open_folder(folder, Options())
    (tmp_path / place).write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        open_folder(folder, Options())


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_pipelines(tmp_path: Path, tensor: int, stages: int, stage: int) -> None:
    run = Run(stage, tensor, 2, "megatron", pipeline=stages, bf16_optimizer=True)
    source = opened(tmp_path, run)
    found = weights(source)
    assert_equal(found, truth() if stage else rounded())
    assert source.layout == (
        f"DeepSpeed 0.19.8, ZeRO {stage}{' over 2 data ranks' if stage else ''}, pipeline {stages} in 6 layer files, "
        f"tensor {tensor}, names of Megatron, {'float32 masters' if stage else 'bfloat16 weights'}"
    )
    if stage and stages > 1:
        copy = source.tensors["wte.weight"].copies[f"pipeline stage {stages - 1}"]
        assert torch.equal(read_sharded(copy), read_sharded(source.tensors["wte.weight"]))
        assert source.step == STEP and len(source.moments["exp_avg"]) == len(source.tensors)


def test_layer_files_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_layers(tmp_path / "run", Run(0, 2, names="megatron", pipeline=2))
    options = replace(HEADS, qkv_version=2, vocab_size=SMALL.vocab_size)
    source = open_folder(tmp_path / "run", options)
    assert_equal(weights(source), rounded())


def test_layer_files_without_a_tensor_rank_and_with_names_of_neox(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    write_layers(folder, Run(0, names="megatron", pipeline=1))
    (folder / "layer_08-model_00-model_states.pt").rename(folder / "layer_08-model_00-model_states.pt.old")
    for path in folder.glob("layer_*.pt"):
        path.rename(folder / path.name.replace("-model_00", "", 1))
    norm = torch.load(folder / "layer_08-model_00-model_states.pt.old")
    torch.save({f"norm.{key}": tensor for key, tensor in norm.items()}, folder / "layer_09-model_states.pt")
    embedding = torch.load(folder / "layer_01-model_states.pt")
    torch.save({"word_embeddings.weight": embedding["word_embeddings.weight"]}, folder / "layer_10-model_states.pt")
    source = open_folder(folder, replace(HEADS, qkv_version=2, vocab_size=SMALL.vocab_size))
    assert_equal(weights(source), rounded())
    assert list(source.tensors["wte.weight"].copies) == ["layer_10"]
    assert source.iteration == 7


def test_model_files_alone_give_16_bit_weights_and_a_note(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2))
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), rounded())
    assert "ZeRO without its optimizer files" in source.layout
    assert any("no *_optim_states.pt" in note for note in source.notes)


def test_the_bf16_optimizer(tmp_path: Path) -> None:
    source = opened(tmp_path, Run(1, 2, 3, bf16_optimizer=True))
    assert_equal(weights(source), truth())
    assert "ZeRO 1 over 3" in source.layout


def test_parameters_that_are_aligned_one_by_one(tmp_path: Path) -> None:
    small = replace(SMALL, n_positions=23, n_embd=24, n_head=4, n_inner=95, vocab_size=101)
    folder = write_tag(tmp_path / "tag", Run(1, 1, 3, aligned=16, model=small))
    source = open_folder(folder, Options(num_heads=4))
    assert_equal(weights(source), truth(small), small)


def test_a_state_per_group_without_padding(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2, data=3))
    for data in range(3):

        def elastic(content: Any, data: int = data) -> None:
            states = content["optimizer_state_dict"]
            masters = states["single_partition_of_fp32_groups"]
            groups = states["base_optimizer_state"]["state"]
            lean = [
                {kind: tensor[: len(masters[number])] for kind, tensor in groups[number].items() if tensor.dim()}
                for number in groups
            ]
            states |= {"base_optimizer_state": lean, "base_optimizer_state_step": STEP}

        edit(folder / f"zero_pp_rank_{data}_mp_rank_00_optim_states.pt", elastic)
    source = open_folder(folder, HEADS)
    found = {name: assemble(source, name, tensor=tensor) for name, tensor in source.moments["exp_avg"].items()}
    assert_equal(found, {name: -tensor for name, tensor in truth().items()})
    assert source.step == STEP


def test_files_of_early_2021(tmp_path: Path) -> None:
    """param_shapes in the optimizer file, one dict for all groups; no underscore before optim; stages are numbers."""
    folder = write_tag(tmp_path / "tag", Run(2, data=3))
    shapes: dict[str, Any] = {}

    def older_model(content: Any) -> None:
        shapes.update({key: shape for group in content.pop("param_shapes") for key, shape in group.items()})
        for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments"):
            del content[key]

    def older_optimizer(content: Any) -> None:
        content["param_shapes"] = shapes
        content["optimizer_state_dict"]["zero_stage"] = 2
        content["optimizer_state_dict"]["partition_count"] = 3
        del content["optimizer_state_dict"]["param_slice_mappings"]

    edit(folder / MODEL, older_model)
    for path in sorted(folder.glob("*optim_states.pt")):
        edit(path, older_optimizer)
        path.rename(folder / path.name.replace("_optim_", "optim_"))
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), truth())
    assert source.model.tied


def test_wrapped_names(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2))

    def wrap(content: Any) -> None:
        prefix = "_forward_module._orig_mod.model."
        content["module"] = {prefix + key: tensor for key, tensor in content["module"].items()}
        content["param_shapes"] = [{prefix + key: s for key, s in g.items()} for g in content["param_shapes"]]
        content["shared_params"] = {prefix + key: prefix + other for key, other in content["shared_params"].items()}

    edit(folder / MODEL, wrap)
    assert_equal(weights(open_folder(folder, HEADS)), truth())


def test_tied_weights_are_found_by_their_storage(tmp_path: Path) -> None:
    """Without ZeRO nothing is recorded: the head is the same storage."""
    source = opened(tmp_path, Run(0))
    assert source.model.tied and "lm_head.weight" not in source.tensors


def test_biases_that_share_a_storage_are_no_second_names(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(0))
    zeros = torch.zeros(32)
    biases = [f"transformer.h.{layer}.ln_1.bias" for layer in range(4)]
    edit(folder / MODEL, lambda content: content["module"].update(dict.fromkeys(biases, zeros)))
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), rounded() | {key.removeprefix("transformer."): zeros for key in biases})


def test_a_head_of_its_own(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False)
    folder = write_tag(tmp_path / "tag", Run(3, data=2, names="transformers", model=model, state={"shared_params": {}}))
    source = open_folder(folder, HEADS)
    assert not source.model.tied
    assert_equal(weights(source), truth(model), model)


def test_an_embedding_that_is_the_second_name_of_the_head(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2))

    def turn(content: Any) -> None:
        names = {"lm_head.weight": "transformer.wte.weight", "transformer.wte.weight": "lm_head.weight"}
        content["param_shapes"] = [{names.get(key, key): s for key, s in g.items()} for g in content["param_shapes"]]
        content["shared_params"] = {"transformer.wte.weight": "lm_head.weight"}

    edit(folder / MODEL, turn)
    for data in range(2):
        edit(
            folder / f"zero_pp_rank_{data}_mp_rank_00_optim_states.pt",
            lambda content: content["optimizer_state_dict"].pop("param_slice_mappings") and None,
        )
    source = open_folder(folder, HEADS)
    assert source.model.tied
    assert_equal(weights(source), truth())


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_were_not_trained(tmp_path: Path, stage: int) -> None:
    """They are in the model file (below ZeRO 3) or in shares of it, and have no float32 weights."""
    frozen = ("transformer.wpe.weight", "transformer.h.2.mlp.c_fc.bias")
    folder = write_tag(tmp_path / "tag", Run(stage, data=3))
    (tensors,) = rank_tensors(Run(stage, data=3))[0]
    trained = [
        [key for key, tensor in tensors.items() if key not in frozen and (tensor.dim() > 1) == large]
        for large in (True, False)
    ]
    for data in range(3):

        def change_optimizer(content: Any, data: int = data) -> None:
            states = content["optimizer_state_dict"]
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            states[key] = [partition([tensors[name] for name in group], stage, 3)[data] for group in trained]
            base = states["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"]
            for number, master in enumerate(states[key]):
                base[number] |= {"exp_avg": -master, "exp_avg_sq": master}
            states.pop("param_slice_mappings", None)

        def change_model(content: Any, data: int = data) -> None:
            content["param_shapes"] = [{name: tensors[name].shape for name in group} for group in trained]
            if stage == 3:
                content["frozen_param_shapes"] = {name: tensors[name].shape for name in frozen}
                content["frozen_param_fragments"] = {
                    name: partition([tensors[name]], 3, 3)[data].bfloat16() for name in frozen
                }

        edit(folder / f"zero_pp_rank_{data}_mp_rank_00_optim_states.pt", change_optimizer)
        if stage == 3:
            edit(folder / f"zero_pp_rank_{data}_mp_rank_00_model_states.pt", change_model)
    if stage < 3:
        edit(folder / MODEL, change_model)
    source = open_folder(folder, HEADS)
    ours = {name.removeprefix("transformer.") for name in frozen}
    expected = {name: (rounded() if name in ours else truth())[name] for name in truth()}
    assert_equal(weights(source), expected)
    assert any(note.startswith("2 tensors were not trained") for note in source.notes)
    assert not source.moments


def test_linear_layers_under_names_of_transformers(tmp_path: Path) -> None:
    """nanoGPT's names are those of transformers, its matrices are [out, in]."""
    folder = write_tag(tmp_path / "tag", Run(0, tensor=2))

    def turn(content: Any) -> None:
        for key, tensor in content["module"].items():
            if ".c_" in key and tensor.dim() == 2:
                content["module"][key] = tensor.t().contiguous()

    for rank in range(2):
        edit(folder / f"mp_rank_0{rank}_model_states.pt", turn)
    source = open_folder(folder, HEADS)
    assert not source.conv1d
    assert_equal(weights(source), rounded())


def test_an_embedding_that_every_tensor_rank_has(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(0, tensor=2))
    for rank in range(2):
        key, whole = "transformer.wte.weight", truth()["wte.weight"].bfloat16()

        def copy(content: Any, key: str = key, whole: Tensor = whole) -> None:
            content["module"][key] = content["module"]["lm_head.weight"] = whole

        edit(folder / f"mp_rank_0{rank}_model_states.pt", copy)
    source = open_folder(folder, replace(HEADS, vocab_size=SMALL.vocab_size))
    assert_equal(weights(source), rounded())
    assert list(source.tensors["wte.weight"].copies) == ["tensor rank 1"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_files_in_the_format_before_torch_1_6(tmp_path: Path, stage: int) -> None:
    folder = write_tag(tmp_path / "tag", Run(stage, tensor=2, names="megatron"))
    with deepspeed_classes():
        for path in folder.iterdir():
            content = torch.load(path, weights_only=False)
            torch.save(content, path, _use_new_zipfile_serialization=False)
    source = open_folder(folder, HEADS)
    found = weights(source)
    assert_equal(found, truth() if stage else rounded())


def test_opening_reads_the_step_and_at_most_a_row_of_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = StoredTensor.read

    def counted(tensor: StoredTensor) -> Tensor:
        read.append(math.prod(tensor.shape[:-1]))
        return original(tensor)

    monkeypatch.setattr(StoredTensor, "read", counted)
    for stage in (2, 3):
        source = opened(tmp_path / str(stage), Run(stage, tensor=2, data=3))
        assert isinstance(source.tensors["wte.weight"].blocks[0].tensor, StoredPieces)
    assert set(read) == {1}
