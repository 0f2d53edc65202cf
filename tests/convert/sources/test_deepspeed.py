"""DeepSpeed's checkpoints: every ZeRO stage, tensor ranks, pipelines, both families of names, and mixed-up folders."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from convert.assemble import read_sharded
from convert.files.stored import StoredPieces, StoredTensor
from convert.sources.deepspeed import matches, open_folder
from convert.sources.options import Options
from convert.sources.source import QKV, Architecture, Source
from tests.convert.deepspeed_files import (
    ITERATION,
    SAMPLES,
    STEP,
    Run,
    deepspeed_classes,
    edit,
    rounded,
    weights,
    write_layers,
    write_tag,
)
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources import checks
from tests.convert.sources.checks import merged

refused = partial(checks.refused, open_folder)
HEADS = Options(num_heads=SMALL.n_head)
SIZES = replace(HEADS, vocab_size=SMALL.vocab_size)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SECOND, THIRD = OPTIMIZER.replace("0", "1", 1), OPTIMIZER.replace("0", "2", 1)


def opened(tmp_path: Path, run: Run, options: Options = HEADS) -> Source:
    return open_folder(write_tag(tmp_path / "global_step120", run), options)


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 2),
        Run(0, 4, names="megatron", version=1),
        Run(1, 1, 3),
        Run(1, 2, 3, bf16_optimizer=True),
        Run(1, 1, 3, aligned=16),
        Run(1, 4, 1, "megatron", 0),
        Run(1, 2, 2, "2019"),
        Run(1, 4, 2, "megatron", pipeline=4, bf16_optimizer=True),
        Run(0, 2, 2, "megatron", pipeline=2),
        Run(2, 2, 1),
        Run(2, 2, 3, "megatron", 1),
        Run(3, 1, 3),
        Run(3, 2, 2, "megatron", 3),
    ],
    ids=lambda run: f"{run.names}-zero{run.stage}-{run.tensor}x{run.data}x{run.pipeline}-version{run.version}",
)
def test_every_layout_is_read(tmp_path: Path, run: Run) -> None:
    source = opened(tmp_path, run, SIZES)
    assert matches(source.path)
    assert_equal(weights(source), truth() if run.stage else rounded())
    assert source.model == SMALL
    assert source.qkv == QKV(run.version if run.names == "megatron" else 0, run.tensor)  # type: ignore[arg-type]
    assert (source.iteration, source.consumed_samples) == (ITERATION, SAMPLES)
    stages, ranks = max(run.pipeline, 1), run.tensor
    assert len(source.files) == stages * ranks * (
        1 + run.data * bool(run.stage) + (run.data - 1) * (run.stage == 3)
    ) + 6 * ranks * bool(run.pipeline)
    assert source.facts["zero_stage"] == run.stage
    assert f"tensor {ranks}" in source.layout and (f"over {run.data} data ranks" in source.layout) == (run.stage > 0)
    if run.stage:
        assert source.step == STEP
        for kind, factor in (("exp_avg", -1.0), ("exp_avg_sq", 0.25)):
            assert_equal(merged(source, kind), {name: tensor * factor for name, tensor in truth().items()})
    else:
        assert not source.moments and source.step is None
    if run.stage and run.pipeline:
        copy = source.tensors["wte.weight"].copies[f"pipeline stage {stages - 1}"]
        assert torch.equal(read_sharded(copy), read_sharded(source.tensors["wte.weight"]))


def test_the_version_of_the_qkv_rows_is_recorded_or_given(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "a", Run(1, tensor=2, names="megatron", version=None))
    refused(folder, "--qkv-version", num_heads=8)
    assert open_folder(folder, replace(HEADS, qkv_version=2)).qkv == QKV(2)
    recorded = write_tag(tmp_path / "b", Run(1, names="megatron"))
    refused(recorded, "--qkv-version is 0", "checkpoint_version is 2", qkv_version=0)
    theirs = write_tag(tmp_path / "c", Run(1))
    refused(theirs, "--qkv-version 2", num_heads=8, qkv_version=2)


def test_heads_come_from_the_arguments_or_are_asked_for(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "a", Run(1, names="megatron"))
    assert open_folder(folder, Options()).model == SMALL
    refused(folder, "--num-heads is 4", "args.num_attention_heads is 8", num_heads=4)
    refused(write_tag(tmp_path / "b", Run(1)), "--num-heads")


def test_a_config_beside_the_tag_is_used(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "global_step120", Run(2))
    path = tmp_path / "config.json"
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 8, "activation_function": "gelu", "layer_norm_epsilon": 1e-6}
    config = {"model_type": "gpt2", **sizes}
    path.write_text(json.dumps(config))
    assert open_folder(folder, Options()).model == replace(SMALL, activation="gelu", layer_norm_epsilon=1e-6)
    assert open_folder(folder, Options(activation="gelu_new")).model.activation == "gelu_new"
    refused(folder, "--num-heads is 4", str(path), num_heads=4)
    for changed in ({"n_layer": 5}, {"scale_attn_by_inverse_layer_idx": True}):
        path.write_text(json.dumps({**config, **changed}))
        with pytest.raises(CheckpointError, match=rf"config\.json: {next(iter(changed))}"):
            open_folder(folder, Options())


def test_layer_files_alone_with_names_of_neox(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    write_layers(folder, Run(0, names="megatron", pipeline=1))
    for path in folder.glob("layer_*.pt"):
        path.rename(folder / path.name.replace("-model_00", "", 1))
    norm, embedding = (torch.load(folder / f"layer_0{number}-model_states.pt") for number in (8, 1))
    (folder / "layer_08-model_states.pt").unlink()
    torch.save({f"norm.{key}": tensor for key, tensor in norm.items()}, folder / "layer_09-model_states.pt")
    torch.save({"word_embeddings.weight": embedding["word_embeddings.weight"]}, folder / "layer_10-model_states.pt")
    source = open_folder(folder, replace(SIZES, qkv_version=2))
    assert_equal(weights(source), rounded())
    assert list(source.tensors["wte.weight"].copies) == ["layer_10"]
    assert source.iteration == 7


def test_model_files_alone_give_16_bit_weights_and_a_note(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2))
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), rounded())
    assert any("_optim_states.pt" in note for note in source.notes)


def test_files_of_early_2021_with_wrapped_names(tmp_path: Path) -> None:
    """param_shapes in the optimizer file, one dict for all groups; no underscore before optim; stages are numbers."""
    folder = write_tag(tmp_path / "tag", Run(2, data=3))
    shapes: dict[str, Any] = {}

    def older_model(content: Any) -> None:
        prefix = "_forward_module._orig_mod.model."
        content["module"] = {prefix + key: tensor for key, tensor in content["module"].items()}
        shapes.update({prefix + key: shape for group in content.pop("param_shapes") for key, shape in group.items()})
        del content["shared_params"], content["frozen_param_shapes"]

    def older_optimizer(content: Any) -> None:
        content["param_shapes"] = shapes
        content["optimizer_state_dict"] |= {"zero_stage": 2, "partition_count": 3}

    edit(folder / MODEL, older_model)
    for path in sorted(folder.glob("*optim_states.pt")):
        edit(path, older_optimizer)
        path.rename(folder / path.name.replace("_optim_", "optim_"))
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), truth())
    assert source.model.tied


def test_biases_that_share_a_storage_are_no_second_names(tmp_path: Path) -> None:
    """Without ZeRO nothing is recorded: the head is tied because it is the embedding's storage."""
    folder = write_tag(tmp_path / "tag", Run(0))
    zeros = torch.zeros(32)
    biases = [f"transformer.h.{layer}.ln_1.bias" for layer in range(4)]
    edit(folder / MODEL, lambda content: content["module"].update(dict.fromkeys(biases, zeros)))
    source = open_folder(folder, HEADS)
    assert_equal(weights(source), rounded() | {key.removeprefix("transformer."): zeros for key in biases})
    assert source.model.tied


def test_a_head_of_its_own(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False)
    source = opened(tmp_path, Run(3, data=2, model=model))
    assert not source.model.tied
    assert_equal(weights(source), truth(model), model)


def test_an_embedding_that_is_the_second_name_of_the_head(tmp_path: Path) -> None:
    folder = write_tag(tmp_path / "tag", Run(2))

    def turn(content: Any) -> None:
        names = {"lm_head.weight": "transformer.wte.weight", "transformer.wte.weight": "lm_head.weight"}
        content["param_shapes"] = [{names.get(key, key): s for key, s in g.items()} for g in content["param_shapes"]]
        content["shared_params"] = {"transformer.wte.weight": "lm_head.weight"}

    edit(folder / MODEL, turn)
    source = open_folder(folder, HEADS)
    assert source.model.tied
    assert_equal(weights(source), truth())


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_were_not_trained(tmp_path: Path, stage: int) -> None:
    """They are in the model file (below ZeRO 3) or in shares of it, and have no float32 weights."""
    frozen = ("wpe.weight", "h.2.mlp.c_fc.bias")
    source = opened(tmp_path, Run(stage, data=3, frozen=tuple(f"transformer.{name}" for name in frozen)))
    assert_equal(weights(source), truth() | {name: rounded()[name] for name in frozen})
    assert any(note.startswith("2 tensors") for note in source.notes)
    assert not source.moments


def test_linear_layers_and_whole_embeddings_under_names_of_transformers(tmp_path: Path) -> None:
    """nanoGPT's names are those of transformers, its matrices are [out, in]; each tensor rank has the embedding."""
    folder = write_tag(tmp_path / "tag", Run(0, tensor=2))

    def turn(content: Any) -> None:
        module, whole = content["module"], truth()["wte.weight"].bfloat16()
        for key, tensor in module.items():
            if ".c_" in key and tensor.dim() == 2:
                module[key] = tensor.t().contiguous()
        module["transformer.wte.weight"] = module["lm_head.weight"] = whole

    for path in folder.iterdir():
        edit(path, turn)
    source = open_folder(folder, SIZES)
    assert not source.conv1d
    assert_equal(weights(source), rounded())
    assert list(source.tensors["wte.weight"].copies) == ["tensor rank 1"]


@pytest.mark.parametrize("stage", [0, 3])
def test_files_in_the_format_before_torch_1_6(tmp_path: Path, stage: int) -> None:
    folder = write_tag(tmp_path / "tag", Run(stage, tensor=2, names="megatron"))
    with deepspeed_classes():
        for path in folder.iterdir():
            torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert_equal(weights(open_folder(folder, HEADS)), truth() if stage else rounded())


def test_opening_reads_at_most_a_row_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = StoredTensor.read

    def counted(tensor: StoredTensor) -> torch.Tensor:
        read.append(math.prod(tensor.shape[:-1]))
        return original(tensor)

    monkeypatch.setattr(StoredTensor, "read", counted)
    source = opened(tmp_path, Run(3, tensor=2, data=3))
    assert isinstance(source.tensors["wte.weight"].blocks[0].tensor, StoredPieces)
    assert set(read) == {1}


Damage = Callable[[Path], object]


def unlink(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def copy(name: str, other: str) -> Damage:
    return lambda folder: shutil.copy(folder / name, folder / other)


def changed(name: str, change: Callable[[Any], Any]) -> Damage:
    return lambda folder: edit(folder / name, change)


def state(content: Any) -> Any:
    return content["optimizer_state_dict"]


def masters(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def apply(content: Any) -> None:
        groups = state(content)["single_partition_of_fp32_groups"]
        groups[0] = change(groups[0])

    return apply


def step_back(content: Any) -> None:
    for group in state(content)["base_optimizer_state"]["state"].values():
        group["step"] = torch.tensor(80.0)


def exchange(content: Any) -> None:
    """Two matrices of the same shape change places."""
    group = dict(content["param_shapes"][0])
    keys = list(group)
    first, second = (keys.index(f"transformer.h.{layer}.mlp.c_fc.weight") for layer in (0, 1))
    keys[first], keys[second] = keys[second], keys[first]
    content["param_shapes"][0] = {key: group[key] for key in keys}


MEGATRON, PIPELINE = Run(0, names="megatron"), Run(1, names="megatron", pipeline=2)
LAYER = "layer_05-model_00-model_states.pt"
MIXED: list[tuple[Run, Damage, list[str]]] = [
    (Run(0, tensor=2), unlink("mp_rank_01_model_states.pt"), ["mp_rank_01_model_states.pt", "2 mp_rank"]),
    (Run(2, tensor=2), unlink("*mp_rank_01_optim*"), ["mp_rank_01_model_states.pt"]),
    (Run(3), unlink("*optim_states.pt"), ["ZeRO 3"]),
    (PIPELINE, unlink(LAYER), [LAYER]),
    (Run(2), copy(OPTIMIZER, THIRD), [THIRD, "2 data ranks"]),
    (Run(0), copy(MODEL, "mp_rank_01_model_states.pt"), ["mp_rank_01_model_states.pt", "1 model-parallel"]),
    (Run(3), copy(f"zero_pp_rank_0_{MODEL}", MODEL), [f"zero_pp_rank_0_{MODEL}"]),
    (Run(0), copy(MODEL, f"layer_0_expert_3_{MODEL}"), [f"layer_0_expert_3_{MODEL}"]),
    (Run(0, tensor=2), changed(MODEL, lambda c: c.update(global_steps=80)), ["global_steps is 120", "80", MODEL]),
    (Run(2, data=3), changed(OPTIMIZER, lambda c: c.update(ds_version="0.9.2")), [OPTIMIZER, "ds_version is 0.9.2"]),
    (Run(2, data=3), changed(THIRD, step_back), [THIRD, "80", "118", OPTIMIZER]),
    (Run(2), changed(OPTIMIZER, lambda c: state(c).update(partition_count=[4, 4])), [THIRD, "4 data ranks"]),
    (Run(2), changed(OPTIMIZER, masters(lambda flat: flat[:-40].clone())), [OPTIMIZER, "elements"]),
    (Run(3), changed(SECOND, lambda c: state(c)["fp32_flat_groups"].pop()), [SECOND, "number of groups"]),
    (Run(2, data=1), changed(OPTIMIZER, masters(lambda flat: flat * 1.05)), ["differs by"]),
    (Run(2), changed(MODEL, exchange), ["mlp.c_fc.weight", "row 31"]),
    (Run(2), changed(MODEL, lambda c: c.update(param_shapes=c["param_shapes"][:1])), [OPTIMIZER, "1 groups", "2"]),
    (Run(0), changed(MODEL, lambda c: c["module"].update({"h.0.attn.rotary.weight": torch.ones(2)})), ["attn.rotary"]),
    (Run(2), changed(MODEL, lambda c: c["module"].update({"transformer.wpe.weight": torch.ones(2, 32)})), ["'wpe."]),
    (Run(0), changed(MODEL, lambda c: c.update(ds_config={"tensor_parallel": {"autotp_size": 2}})), ["AutoTP"]),
    (MEGATRON, changed(MODEL, lambda c: setattr(c["args"], "num_layers", 5)), ["args.num_layers is 5", "4"]),
]


@pytest.mark.parametrize(("run", "damage", "parts"), MIXED, ids=[" ".join(parts) for _, _, parts in MIXED])
def test_files_that_do_not_belong_together_are_refused_by_name(
    tmp_path: Path, run: Run, damage: Damage, parts: list[str]
) -> None:
    folder = write_tag(tmp_path / "global_step120", run)
    damage(folder)
    refused(folder, *parts, num_heads=8)


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_values_of_unexpected_types_are_read_right_or_refused(tmp_path: Path, file: str) -> None:
    model = Architecture(n_layer=1, n_head=8, n_embd=8, n_positions=4, n_inner=8, vocab_size=300)
    folder = write_tag(tmp_path / "tag", Run(2, data=1, names="megatron", model=model))
    with deepspeed_classes():
        content = torch.load(folder / file, weights_only=False)
        states = content if file == MODEL else content["optimizer_state_dict"]
        for key, value in [*states.items()]:
            for odd in (None, [3], {"a": "b"}, torch.ones(2, 2)):
                states[key] = odd
                torch.save(content, folder / file)
                try:
                    source = open_folder(folder, SIZES)
                except CheckpointError as error:
                    assert str(folder) in str(error) and "\n" not in str(error)
                else:
                    expected = truth(model) if "float32 masters" in source.layout else rounded(model)
                    assert_equal(weights(source), expected, model)
            states[key] = value
