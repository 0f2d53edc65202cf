"""Megatron-core's torch_dist folders: every layout gives the same model, and damage is one line."""

import pickle
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from common.errors import CheckpointError
from convert.assemble import assemble
from convert.files.stored import StoredTensor
from convert.sources.options import Options
from convert.sources.source import Source
from convert.sources.torch_dist import matches, open_folder
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources.torch_dist_files import (
    FolderWriter,
    add_flattened,
    add_model,
    arguments,
    padded,
    write_backend,
    write_folder,
)
from tests.training.checkpoint.planted import Touch, metadata_of, plant_record, write_metadata
from training.checkpoint.metadata import RAW

PREFIXES = ["", "model.", "module.", "model.module.", "model.module.module."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000100"


def merged(source: Source, moment: str = "") -> dict[str, Tensor]:
    """Every tensor in our layout."""
    return {
        name: assemble(source, name, tensor=source.moments[moment][name] if moment else None) for name in source.tensors
    }


def read(folder: Path, **options: Any) -> Source:
    assert matches(folder)
    return open_folder(folder, Options(**options))


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(folder, **options)
    message = str(error.value)
    assert "\n" not in message and str(folder) in message, message
    return message


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("stacked", [True, False])
def test_every_layout_gives_the_same_model(folder: Path, tp: int, pp: int, stacked: bool) -> None:
    write_folder(folder, truth(), tp=tp, pp=pp, stacked=stacked).close()
    source = read(folder)
    assert_equal(merged(source), truth())
    assert source.model == SMALL and source.notes == ()
    assert (source.iteration, source.consumed_samples, source.moments, source.step) == (100, 1600, {}, None)
    stack = " (stacked)" if stacked else ""
    assert source.layout == f"Megatron-core torch_dist, 4 layers{stack}, written by tensor {tp} x pipeline {pp}"
    assert {path.name for path in source.files} == {
        ".metadata",
        "common.pt",
        "metadata.json",
        *(f"__{rank}_0.distcp" for rank in range(tp * pp)),
    }


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stacked", [True, False])
def test_keys_may_have_prefixes(folder: Path, prefix: str, stacked: bool) -> None:
    write_folder(folder, truth(), tp=2, stacked=stacked, prefix=prefix).close()
    assert_equal(merged(read(folder)), truth())


def test_the_folders_of_these_tests_are_what_dcp_reads(folder: Path) -> None:
    write_folder(folder, truth(), tp=2, pp=2).close()
    key = "decoder.layers.mlp.linear_fc2.weight"
    found = {key: torch.empty(4, 32, 128)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found[key], torch.stack([truth()[f"h.{layer}.mlp.c_proj.weight"] for layer in range(4)]))


def test_an_untied_head_is_read(folder: Path) -> None:
    weights = {**truth(), "lm_head.weight": truth()["wte.weight"].flip(0)}
    write_folder(folder, weights, tp=2, pp=2, args={"untie_embeddings_and_output_weights": True}).close()
    source = read(folder)
    assert not source.model.tied
    assert torch.equal(assemble(source, "lm_head.weight"), weights["lm_head.weight"])


def test_the_common_part_may_be_an_object_among_the_tensors(folder: Path) -> None:
    writer = write_folder(folder, truth())
    (folder / "common.pt").unlink()
    args = arguments(SMALL, hidden_dropout=0.2, attention_dropout=0.2, layernorm_zero_centered_gamma=False)
    writer.add_object(0, "common_state/shard_0_1", [{"args": args, "iteration": 100, "checkpoint_version": 3.0}])
    writer.close()
    source = read(folder)
    assert (source.model.n_head, source.model.dropout, source.iteration) == (8, 0.2, 100)
    assert source.facts["checkpoint_version"] == 3.0 and source.facts["args"]["hidden_dropout"] == 0.2


def test_torch_dcp_keeps_args_as_an_object_of_their_own(folder: Path) -> None:
    writer = FolderWriter(folder)
    add_model(writer, padded(truth()), stacked=False, prefix="model.")
    writer.add_object(0, "args", arguments(SMALL))
    writer.add_object(0, "iteration", 100)
    writer.close()
    source = read(folder)
    assert_equal(merged(source), truth())
    assert source.iteration == 100 and source.model == SMALL


def test_without_a_common_part_heads_and_vocabulary_must_be_given(folder: Path) -> None:
    write_folder(folder, truth()).close()
    (folder / "common.pt").unlink()
    assert "--num-heads" in refused(folder)
    source = read(folder, num_heads=8, vocab_size=300)
    assert_equal(merged(source), truth())
    assert source.iteration == 100 and source.model == SMALL
    assert "--vocab-size is 385, but the embedding has 384 rows" in refused(folder, num_heads=8, vocab_size=385)


def test_masters_and_moments_are_read_by_name(folder: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in truth().items()}
    optimizer = {"optimizer": {"state": {"common_step": torch.tensor(97.0)}, "param_groups": [{"lr": 0.1}]}}
    writer = write_folder(folder, half, tp=2, pp=2, common={"optimizer": optimizer})
    moments = {"exp_avg": {n: t * 2 for n, t in truth().items()}, "exp_avg_sq": {n: t**2 for n, t in truth().items()}}
    for kind, tensors in {"fp32_param": truth(), **moments}.items():
        add_model(writer, padded(tensors), tp=2, pp=2, prefix=f"optimizer.state.{kind}.")
    writer.close()
    source = read(folder)
    assert_equal(merged(source), truth())
    for kind, tensors in moments.items():
        found = merged(source, kind)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors), kind
    assert source.step == 97
    assert source.notes == ("weights are the optimizer's float32 masters (52 of 52 tensors)",)


@pytest.mark.parametrize("prefix", ["optimizer.state.param.", "chained_0.optimizer.state.fp32_param."])
def test_masters_have_other_names_in_other_optimizers(folder: Path, prefix: str) -> None:
    writer = write_folder(folder, {name: tensor.half() for name, tensor in truth().items()})
    layers = {name: tensor for name, tensor in truth().items() if "ln_" not in name}  # norms were float32 already
    add_model(writer, padded(layers), prefix=prefix)
    writer.close()
    source = read(folder)
    assert_equal({name: tensor for name, tensor in merged(source).items() if "ln_" not in name}, layers)
    assert source.tensors["ln_f.bias"].blocks[0].tensor.dtype == torch.float16
    assert source.notes == ("weights are the optimizer's float32 masters (34 of 52 tensors)",)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_flattened_parts_of_a_distributed_optimizer_are_put_together(folder: Path, tp: int, stacked: bool) -> None:
    """Until 0.15: [parts along each dimension, elements of a part], cut anywhere in the last one."""
    half = {name: tensor.half() for name, tensor in truth().items()}
    writer = write_folder(folder, half, tp=tp, stacked=stacked)
    states = {"fp32_param": truth(), "exp_avg": {n: t * 2 for n, t in truth().items()}, "exp_avg_sq": truth()}
    for kind, tensors in states.items():
        add_flattened(writer, padded(tensors), f"optimizer.state.{kind}.", tp=tp, stacked=stacked)
    writer.close()
    source = read(folder)
    assert_equal(merged(source), truth())
    assert_equal(merged(source, "exp_avg_sq"), truth())
    assert all(torch.equal(tensor, truth()[name] * 2) for name, tensor in merged(source, "exp_avg").items())
    assert source.step == 100
    assert source.notes == (
        "weights are the optimizer's float32 masters (52 of 52 tensors)",
        "the optimizer's step is not recorded: 100, the iteration, is taken",
    )


@pytest.mark.parametrize("damage", ["lost", "moved"])
def test_a_gap_between_flattened_parts_is_refused(folder: Path, damage: str) -> None:
    writer = write_folder(folder, {name: tensor.half() for name, tensor in truth().items()})
    add_flattened(writer, padded(truth()), "optimizer.state.fp32_param.")
    key = "optimizer.state.fp32_param.embedding.word_embeddings.weight"
    chunks = chunks_of(writer.metadata, key)
    if damage == "lost":
        chunks.pop()
    else:
        records = writer.metadata.storage_data
        index = next(index for index in records if index.fqn == key and index.offset == chunks[0].offsets)
        chunks[0].offsets = torch.Size((*chunks[0].offsets[:-1], 7))
        records[type(index)(key, chunks[0].offsets)] = records.pop(index)
    writer.close()
    assert f"tensor {key!r} has gaps at [0, 0" in refused(folder)


def test_flat_optimizer_state_is_left_and_said(folder: Path) -> None:
    writer = write_folder(folder, truth())
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    writer.add(0, key, (64,), (0,), torch.zeros(64))
    writer.add(0, "optimizer.state.exp_avg.decoder.final_layernorm.bias", (1, 32), (0, 0), torch.zeros(1, 32))
    writer.close()
    source = read(folder)
    assert source.moments == {}
    assert source.notes == (
        "optimizer state that is not stored per parameter (flat buffers) is left",
        "the optimizer's moments are left: exp_avg of wte.weight is missing or has another shape",
    )


def test_nothing_but_the_heads_of_records_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(folder, truth()).close()
    monkeypatch.setattr(StoredTensor, "read", None)
    read(folder)


def test_our_own_records_need_not_be_opened(folder: Path) -> None:
    write_folder(folder, truth()).close()
    metadata = metadata_of(folder)
    index = next(index for index in metadata.storage_data if index.fqn.endswith("word_embeddings.weight"))
    start = metadata.storage_data[index].offset
    values = torch.rand(384, 32)
    path = folder / metadata.storage_data[index].relative_path
    with path.open("r+b") as file:
        file.seek(start + 8)
        file.write(values.numpy().tobytes())  # over the zip archive, which is no archive any more
    setattr(metadata.storage_data[index], RAW, (start + 8, values.nbytes, torch.float32))
    write_metadata(folder, metadata)
    assert torch.equal(assemble(read(folder), "wte.weight"), values[:300])


def test_extra_state_and_rng_state_are_never_read(folder: Path, tmp_path: Path) -> None:
    writer = write_folder(folder, truth())
    mark = tmp_path / "mark"
    for key in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", "rng_state/shard_0.0_1.1", "rerun_state"):
        writer.add_object(7, key, Touch(mark))
    writer.close()
    (folder / "__7_0.distcp").unlink()
    assert_equal(merged(read(folder)), truth())


def touch_metadata(folder: Path, touch: Touch) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(touch))


def touch_record(folder: Path, touch: Touch) -> None:
    plant_record(folder, "decoder.final_layernorm.bias", touch.mark)


@pytest.mark.parametrize("plant", [touch_metadata, touch_record])
def test_planted_pickles_are_never_run(folder: Path, tmp_path: Path, plant: Callable[[Path, Touch], None]) -> None:
    write_folder(folder, truth()).close()
    touch = Touch(tmp_path / "mark")
    plant(folder, touch)
    message = refused(folder)
    assert not touch.mark.exists() and "mkdir" in message


@pytest.mark.parametrize("in_tensors", [True, False])
def test_a_pickle_planted_in_the_common_part_is_never_run(folder: Path, tmp_path: Path, in_tensors: bool) -> None:
    touch = Touch(tmp_path / "mark")
    writer = write_folder(folder, truth(), common={"rerun_state_machine": touch})
    if in_tensors:
        (folder / "common.pt").unlink()
        writer.add_object(0, "common_state/shard_0_1", [{"args": arguments(SMALL), "more": touch}])
    writer.close()
    assert "mkdir" in refused(folder)
    assert not touch.mark.exists()


def test_foreign_classes_in_the_common_part_stay_inert(folder: Path) -> None:
    write_folder(folder, truth(), args={"model_type": Kind.ENCODER}, common={"rerun": Stateful()}).close()
    assert read(folder).model == SMALL
    assert not Stateful.restored


class Kind(Enum):
    ENCODER = 1


class Stateful:
    restored = False

    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        Stateful.restored = True


def cut(folder: Path) -> None:
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[:-1])


def unlink(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def chunks_of(metadata: Any, key: str = "decoder.layers.mlp.linear_fc1.weight") -> list[ChunkStorageMetadata]:
    described = metadata.state_dict_metadata[key]
    assert isinstance(described, TensorStorageMetadata)
    return described.chunks


def lose_chunk(folder: Path) -> None:
    metadata = metadata_of(folder)
    del chunks_of(metadata)[1]
    write_metadata(folder, metadata)


def lose_record(folder: Path) -> None:
    metadata = metadata_of(folder)
    del metadata.storage_data[next(index for index in metadata.storage_data if "linear_fc1.weight" in index.fqn)]
    write_metadata(folder, metadata)


def shift_chunk(folder: Path) -> None:
    """The second half of layer 0 now lies over the first one, at 32 rows."""
    metadata = metadata_of(folder)
    chunk = next(chunk for chunk in chunks_of(metadata) if tuple(chunk.offsets) == (0, 64, 0))
    for index in list(metadata.storage_data):
        if "linear_fc1.weight" in index.fqn and index.offset == chunk.offsets:
            metadata.storage_data[type(index)(index.fqn, (0, 32, 0))] = metadata.storage_data.pop(index)
    chunk.offsets = torch.Size((0, 32, 0))
    write_metadata(folder, metadata)


def outside(folder: Path) -> None:
    metadata = metadata_of(folder)
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].size = torch.Size((4, 96, 32))  # type: ignore[union-attr]
    write_metadata(folder, metadata)


def swap_records(folder: Path) -> None:
    metadata = metadata_of(folder)
    norm, bias = (
        next(index for index in metadata.storage_data if key in index.fqn)
        for key in ("linear_fc1.layer_norm_weight", "linear_fc1.bias")
    )
    records = metadata.storage_data
    records[norm], records[bias] = records[bias], records[norm]
    write_metadata(folder, metadata)


def spoil_record(folder: Path) -> None:
    metadata = metadata_of(folder)
    record = next(record for index, record in metadata.storage_data.items() if "final_layernorm.bias" in index.fqn)
    with (folder / record.relative_path).open("r+b") as file:
        file.seek(record.offset)
        file.write(b"\0" * record.length)


def transform(folder: Path) -> None:
    metadata = metadata_of(folder)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    write_metadata(folder, metadata)


def rename(folder: Path, old: str, new: str, *, keep: bool = False) -> None:
    metadata = metadata_of(folder)
    table = metadata.state_dict_metadata
    table[new] = table[old] if keep else table.pop(old)
    for index in list(metadata.storage_data):
        if index.fqn == old:
            record = metadata.storage_data[index] if keep else metadata.storage_data.pop(index)
            metadata.storage_data[type(index)(new, index.offset, index.index)] = record
    write_metadata(folder, metadata)


def no_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def spoil_json(folder: Path) -> None:
    (folder / "metadata.json").write_text("{")


def spoil_common(folder: Path) -> None:
    (folder / "common.pt").write_bytes((folder / "common.pt").read_bytes()[:-30])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, r"__1_0.distcp: cut off: '.+' ends at byte \d+, the file has \d+"),
        (unlink, r"__1_0.distcp: missing; '.+' is in it"),
        (lose_chunk, r"tensor 'decoder.layers.mlp.linear_fc1.weight': its 1 parts do not add up to shape \[128, 32\]"),
        (lose_record, r"the part of 'decoder.layers.mlp.linear_fc1.weight' at \[0, 0, 0\] is in no file"),
        (shift_chunk, r"tensor 'decoder.layers.mlp.linear_fc1.weight': its 2 parts do not add up to shape"),
        (outside, r"tensor '.+' of shape \[4, 96, 32\] has a part of shape \[1, 64, 32\] at \[0, 64, 0\]"),
        (swap_records, r"part of tensor '.+' is torch.float32 \[1, 64\], but .metadata says torch.float32 \[1, 32\]"),
        (spoil_record, r"__2_0.distcp: the record of tensor 'decoder.final_layernorm.bias' is damaged"),
        (transform, r"is transformed \(stream.zstd\), which is not read"),
        (
            lambda folder: rename(folder, "decoder.final_layernorm.bias", "decoder.layers.mlp.router.weight"),
            r"unknown tensor 'decoder.layers.mlp.router.weight' of shape \[32\]: no GPT-2 has it",
        ),
        (
            lambda folder: rename(folder, "decoder.final_layernorm.bias", "rng_state"),
            r"tensor 'ln_f.bias' is missing",
        ),
        (
            lambda folder: rename(
                folder, "decoder.final_layernorm.bias", "model.decoder.final_layernorm.bias", keep=True
            ),
            r"tensor 'model.decoder.final_layernorm.bias' is there twice",
        ),
        (no_metadata, r"\.metadata: cannot be read \(No such file or directory\)"),
        (spoil_json, r"metadata.json: no JSON"),
        (spoil_common, r"common.pt: damaged or cut off"),
        (lambda folder: write_backend(folder, "zarr"), "saved by the backend 'zarr'; only torch_dist is read"),
    ],
)
def test_damage_is_one_line_that_names_it(folder: Path, damage: Callable[[Path], None], problem: str) -> None:
    write_folder(folder, truth(), tp=2, pp=2).close()
    damage(folder)
    message = refused(folder)
    assert re.search(problem, message), message


def test_a_common_part_of_another_iteration_is_refused(folder: Path) -> None:
    write_folder(folder, truth(), common={"iteration": 200}).close()
    assert "the folder is of iteration 100, its common part of iteration 200" in refused(folder)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"num_layers": 5}, "args.num_layers is 5, but the tensors have 4"),
        ({"swiglu": True}, "args.swiglu is True: the model is no GPT-2"),
        ({"untie_embeddings_and_output_weights": True}, "output_layer.weight is absent"),
    ],
)
def test_what_the_args_contradict_is_refused(folder: Path, args: dict[str, Any], problem: str) -> None:
    write_folder(folder, truth(), args=args).close()
    assert problem in refused(folder)


def test_other_folders_do_not_match(tmp_path: Path) -> None:
    assert not matches(tmp_path)
    (tmp_path / "metadata.json").write_text("[]")
    assert not matches(tmp_path)
    write_backend(tmp_path, "zarr")
    assert matches(tmp_path)
