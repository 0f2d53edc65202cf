"""Megatron-core's torch_dist folders: every layout gives the same model, and damage is one line."""

import pickle
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from convert.assemble import assemble
from convert.files.stored import StoredTensor
from convert.sources.options import Options
from convert.sources.torch_dist import matches, open_folder
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.sources import checks
from tests.convert.sources.checks import merged
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

refused = partial(checks.refused, open_folder)
MASTERS = "optimizer.state.fp32_param."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000100"


def half() -> dict[str, Tensor]:
    return {name: tensor.half() for name, tensor in truth().items()}


@pytest.mark.parametrize(
    ("tp", "pp", "stacked", "prefix"),
    [
        (1, 1, True, ""),
        (1, 2, False, "model."),
        (2, 2, True, "module."),
        (4, 1, False, "model.module.module."),
        (8, 2, True, ""),
    ],
)
def test_every_layout_gives_the_same_model(folder: Path, tp: int, pp: int, stacked: bool, prefix: str) -> None:
    write_folder(folder, truth(), tp=tp, pp=pp, stacked=stacked, prefix=prefix).close()
    assert matches(folder)
    source = open_folder(folder, Options())
    assert_equal(merged(source), truth())
    assert source.model == SMALL and source.notes == ()
    assert (source.iteration, source.consumed_samples, source.moments, source.step) == (100, 1600, {}, None)
    assert f"tensor {tp} x pipeline {pp}" in source.layout and ("stacked" in source.layout) == stacked
    assert {path.name for path in source.files} == {
        ".metadata",
        "common.pt",
        "metadata.json",
        *(f"__{rank}_0.distcp" for rank in range(tp * pp)),
    }


def test_the_folders_of_these_tests_are_what_dcp_reads(folder: Path) -> None:
    write_folder(folder, truth(), tp=2, pp=2).close()
    key = "decoder.layers.mlp.linear_fc2.weight"
    found = {key: torch.empty(4, 32, 128)}
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp_load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found[key], torch.stack([truth()[f"h.{layer}.mlp.c_proj.weight"] for layer in range(4)]))


def test_an_untied_head_is_read(folder: Path) -> None:
    weights = {**truth(), "lm_head.weight": truth()["wte.weight"].flip(0)}
    write_folder(folder, weights, tp=2, pp=2, args={"untie_embeddings_and_output_weights": True}).close()
    source = open_folder(folder, Options())
    assert not source.model.tied
    assert torch.equal(assemble(source, "lm_head.weight"), weights["lm_head.weight"])


def test_the_common_part_may_be_an_object_among_the_tensors(folder: Path, tmp_path: Path) -> None:
    writer = write_folder(folder, truth())
    (folder / "common.pt").unlink()
    args = arguments(SMALL, hidden_dropout=0.2, attention_dropout=0.2, layernorm_zero_centered_gamma=False)
    writer.add_object(0, "common_state/shard_0_1", [{"args": args, "iteration": 100, "checkpoint_version": 3.0}])
    writer.close()
    source = open_folder(folder, Options())
    assert (source.model.n_head, source.model.dropout, source.iteration) == (8, 0.2, 100)
    assert source.facts["checkpoint_version"] == 3.0 and source.facts["args"]["hidden_dropout"] == 0.2
    writer = FolderWriter(tmp_path / "torch_dcp")  # each in an object of its own
    add_model(writer, padded(truth()), stacked=False, prefix="model.")
    writer.add_object(0, "args", arguments(SMALL))
    writer.add_object(0, "iteration", 100)
    writer.close()
    source = open_folder(tmp_path / "torch_dcp", Options())
    assert_equal(merged(source), truth())
    assert source.iteration == 100 and source.model == SMALL


def test_without_a_common_part_heads_and_vocabulary_must_be_given(folder: Path) -> None:
    write_folder(folder, truth()).close()
    (folder / "common.pt").unlink()
    refused(folder, "--num-heads")
    source = open_folder(folder, Options(num_heads=8, vocab_size=300))
    assert_equal(merged(source), truth())
    assert source.iteration == 100 and source.model == SMALL
    refused(folder, "--vocab-size is 385", "384 rows", num_heads=8, vocab_size=385)


def test_masters_and_moments_are_read_by_name(folder: Path) -> None:
    optimizer = {"optimizer": {"state": {"common_step": torch.tensor(97.0)}, "param_groups": [{"lr": 0.1}]}}
    writer = write_folder(folder, half(), tp=2, pp=2, common={"optimizer": optimizer})
    moments = {"exp_avg": {n: t * 2 for n, t in truth().items()}, "exp_avg_sq": {n: t / 4 for n, t in truth().items()}}
    for kind, tensors in {"fp32_param": truth(), **moments}.items():
        add_model(writer, padded(tensors), tp=2, pp=2, prefix=f"optimizer.state.{kind}.")
    writer.close()
    source = open_folder(folder, Options())
    assert_equal(merged(source), truth())
    for kind, tensors in moments.items():
        assert_equal(merged(source, kind), tensors)
    assert source.step == 97
    assert len(source.notes) == 1 and "52 of 52 tensors" in source.notes[0]


@pytest.mark.parametrize("prefix", ["optimizer.state.param.", "chained_0.optimizer.state.fp32_param."])
def test_masters_have_other_names_in_other_optimizers(folder: Path, prefix: str) -> None:
    writer = write_folder(folder, half())
    layers = {name: tensor for name, tensor in truth().items() if "ln_" not in name}  # norms were float32 already
    add_model(writer, padded(layers), prefix=prefix)
    writer.close()
    source = open_folder(folder, Options())
    assert_equal({name: tensor for name, tensor in merged(source).items() if "ln_" not in name}, layers)
    assert source.tensors["ln_f.bias"].blocks[0].tensor.dtype == torch.float16
    assert "34 of 52 tensors" in source.notes[0]


@pytest.mark.parametrize(("tp", "stacked"), [(1, True), (4, True), (2, False)])
def test_flattened_parts_of_a_distributed_optimizer_are_put_together(folder: Path, tp: int, stacked: bool) -> None:
    """Until 0.15: [parts along each dimension, elements of a part], cut anywhere in the last one."""
    writer = write_folder(folder, half(), tp=tp, stacked=stacked)
    states = {"fp32_param": truth(), "exp_avg": {n: t * 2 for n, t in truth().items()}, "exp_avg_sq": truth()}
    for kind, tensors in states.items():
        add_flattened(writer, padded(tensors), f"optimizer.state.{kind}.", tp=tp, stacked=stacked)
    writer.close()
    source = open_folder(folder, Options())
    assert_equal(merged(source), truth())
    assert_equal(merged(source, "exp_avg_sq"), truth())
    assert_equal(merged(source, "exp_avg"), states["exp_avg"])
    assert source.step == 100 and len(source.notes) == 2  # the iteration, because no step is recorded


@pytest.mark.parametrize("lost", [True, False])
def test_a_gap_between_flattened_parts_is_refused(folder: Path, lost: bool) -> None:
    writer = write_folder(folder, half())
    add_flattened(writer, padded(truth()), MASTERS)
    key = f"{MASTERS}embedding.word_embeddings.weight"
    chunks, records = chunks_of(writer.metadata, key), writer.metadata.storage_data
    if lost:
        chunks.pop()
    else:
        index = next(index for index in records if index.fqn == key and index.offset == chunks[0].offsets)
        chunks[0].offsets = torch.Size((*chunks[0].offsets[:-1], 7))
        records[type(index)(key, chunks[0].offsets)] = records.pop(index)
    writer.close()
    refused(folder, ".metadata", repr(key), "[0, 0")


def test_flat_optimizer_state_is_left_and_said(folder: Path) -> None:
    writer = write_folder(folder, truth())
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    writer.add(0, key, (64,), (0,), torch.zeros(64))
    writer.add(0, "optimizer.state.exp_avg.decoder.final_layernorm.bias", (1, 32), (0, 0), torch.zeros(1, 32))
    writer.close()
    source = open_folder(folder, Options())
    assert source.moments == {} and len(source.notes) == 2 and "wte.weight" in source.notes[1]


def test_nothing_but_the_heads_of_records_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(folder, truth()).close()
    monkeypatch.setattr(StoredTensor, "read", None)
    open_folder(folder, Options())


def test_our_own_records_need_not_be_opened(folder: Path) -> None:
    write_folder(folder, truth()).close()
    metadata = metadata_of(folder)
    index = next(index for index in metadata.storage_data if index.fqn.endswith("word_embeddings.weight"))
    start, values = metadata.storage_data[index].offset, torch.rand(384, 32)
    with (folder / metadata.storage_data[index].relative_path).open("r+b") as file:
        file.seek(start + 8)
        file.write(values.numpy().tobytes())  # over the zip archive, which is no archive any more
    setattr(metadata.storage_data[index], RAW, (start + 8, values.nbytes, torch.float32))
    write_metadata(folder, metadata)
    assert torch.equal(assemble(open_folder(folder, Options()), "wte.weight"), values[:300])


def test_extra_state_and_rng_state_are_never_read(folder: Path, tmp_path: Path) -> None:
    writer = write_folder(folder, truth())
    for key in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", "rng_state/shard_0.0_1.1", "rerun_state"):
        writer.add_object(7, key, Touch(tmp_path / "mark"))
    writer.close()
    (folder / "__7_0.distcp").unlink()
    assert_equal(merged(open_folder(folder, Options())), truth())


@pytest.mark.parametrize("place", [".metadata", "record", "common.pt", "common record"])
def test_planted_pickles_are_never_run(folder: Path, tmp_path: Path, place: str) -> None:
    touch = Touch(tmp_path / "mark")
    writer = write_folder(folder, truth(), common={"rerun_state_machine": touch} if place == "common.pt" else {})
    if place == "common record":
        (folder / "common.pt").unlink()
        writer.add_object(0, "common_state/shard_0_1", [{"args": arguments(SMALL), "more": touch}])
    writer.close()
    if place == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(touch))
    elif place == "record":
        plant_record(folder, "decoder.final_layernorm.bias", touch.mark)
    refused(folder, "mkdir")
    assert not touch.mark.exists()


def test_foreign_classes_in_the_common_part_stay_inert(folder: Path) -> None:
    write_folder(folder, truth(), args={"model_type": Kind.ENCODER}, common={"rerun": Stateful()}).close()
    assert open_folder(folder, Options()).model == SMALL
    assert not Stateful.restored


class Kind(Enum):
    ENCODER = 1


class Stateful:
    restored = False

    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        Stateful.restored = True


FC1, BIAS = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.bias"


def chunks_of(metadata: Metadata, key: str = FC1) -> list[ChunkStorageMetadata]:
    described = metadata.state_dict_metadata[key]
    assert isinstance(described, TensorStorageMetadata)
    return described.chunks


def record_of(metadata: Metadata, key: str) -> Any:
    return next(index for index in metadata.storage_data if key in index.fqn)


def lose_record(metadata: Metadata) -> None:
    del metadata.storage_data[record_of(metadata, FC1)]


def shift_chunk(metadata: Metadata) -> None:
    """The second half of layer 0 now lies over the first one, at 32 rows."""
    chunk = next(chunk for chunk in chunks_of(metadata) if tuple(chunk.offsets) == (0, 64, 0))
    for index in [index for index in metadata.storage_data if index.fqn == FC1 and index.offset == chunk.offsets]:
        metadata.storage_data[type(index)(FC1, (0, 32, 0))] = metadata.storage_data.pop(index)
    chunk.offsets = torch.Size((0, 32, 0))


def enlarge(metadata: Metadata) -> None:
    metadata.state_dict_metadata[FC1].size = torch.Size((4, 96, 32))  # type: ignore[union-attr]


def swap_records(metadata: Metadata) -> None:
    norm, bias = (record_of(metadata, key) for key in ("linear_fc1.layer_norm_weight", "linear_fc1.bias"))
    records = metadata.storage_data
    records[norm], records[bias] = records[bias], records[norm]


def transform(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def rename(new: str, *, keep: bool = False) -> Callable[[Metadata], None]:
    def apply(metadata: Metadata) -> None:
        table, index = metadata.state_dict_metadata, record_of(metadata, BIAS)
        table[new] = table[BIAS] if keep else table.pop(BIAS)
        record = metadata.storage_data[index] if keep else metadata.storage_data.pop(index)
        metadata.storage_data[type(index)(new, index.offset, index.index)] = record

    return apply


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda metadata: chunks_of(metadata).pop(1), [FC1, "[128, 32]"]),
        (lose_record, [FC1, "[0, 0, 0]"]),
        (shift_chunk, [FC1, "[128, 32]"]),
        (enlarge, [FC1, "[4, 96, 32]", "[0, 64, 0]"]),
        (swap_records, ["[1, 64]", "[1, 32]"]),
        (transform, ["stream.zstd"]),
        (rename("decoder.layers.mlp.router.weight"), ["decoder.layers.mlp.router.weight", "[32]"]),
        (rename("rng_state"), ["'ln_f.bias'"]),
        (rename(f"model.{BIAS}", keep=True), [f"model.{BIAS}"]),
    ],
    ids=["chunk", "record", "overlap", "size", "swapped", "transformed", "unknown", "missing", "twice"],
)
def test_a_metadata_file_that_contradicts_the_records_or_the_model_is_refused(
    folder: Path, damage: Callable[[Metadata], object], parts: list[str]
) -> None:
    write_folder(folder, truth(), tp=2, pp=2).close()
    metadata = metadata_of(folder)
    damage(metadata)
    write_metadata(folder, metadata)
    refused(folder, *parts)


@pytest.mark.parametrize(
    ("args", "common", "parts"),
    [
        ({}, {"iteration": 200}, ["iteration 100", "iteration 200"]),
        ({"num_layers": 5}, {}, ["args.num_layers is 5", "4"]),
        ({"swiglu": True}, {}, ["args.swiglu is True"]),
        ({"untie_embeddings_and_output_weights": True}, {}, ["output_layer.weight"]),
    ],
)
def test_what_the_common_part_contradicts_is_refused(
    folder: Path, args: Mapping[str, Any], common: Mapping[str, Any], parts: list[str]
) -> None:
    write_folder(folder, truth(), args=args, common=common).close()
    refused(folder, *parts)


def test_other_backends_and_folders_are_told_apart(tmp_path: Path) -> None:
    assert not matches(tmp_path)
    (tmp_path / "metadata.json").write_text("[]")
    assert not matches(tmp_path)
    write_backend(tmp_path, "zarr")
    assert matches(tmp_path)
    refused(tmp_path, "'zarr'")
    write_backend(tmp_path)
    refused(tmp_path, ".metadata")
