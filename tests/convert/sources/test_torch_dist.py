"""Megatron-core's torch_dist folders: every layout gives the same model, and damage is one line."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

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
from tests.training.checkpoint.planted import Touch, metadata_of, write_metadata

refused = partial(checks.refused, open_folder)


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
    model = replace(SMALL, tied=tp != 4)
    said = {"untie_embeddings_and_output_weights": not model.tied}
    write_folder(folder, truth(model), args=said, tp=tp, pp=pp, stacked=stacked, prefix=prefix).close()
    assert matches(folder)
    source = open_folder(folder, Options())
    assert_equal(merged(source), truth(model), model)
    assert source.model == model and source.notes == ()
    assert (source.iteration, source.consumed_samples, source.moments, source.step) == (100, 1600, {}, None)
    assert f"tensor {tp} x pipeline {pp}" in source.layout and ("stacked" in source.layout) == stacked
    assert {path.name for path in source.files} == {
        ".metadata",
        "common.pt",
        "metadata.json",
        *(f"__{rank}_0.distcp" for rank in range(tp * pp)),
    }


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


@pytest.mark.parametrize(
    ("add", "tp", "stacked", "master"),
    [
        (add_model, 2, True, "optimizer.state.fp32_param."),
        (add_model, 1, False, "chained_0.optimizer.state.param."),
        (add_flattened, 4, True, "optimizer.state.fp32_param."),
        (add_flattened, 2, False, "optimizer.state.fp32_param."),
    ],
)
def test_masters_and_moments_are_read(folder: Path, add: Any, tp: int, stacked: bool, master: str) -> None:
    """Until 0.15 as [parts along each dimension, elements of a part], cut anywhere in the last one."""
    step = {"state": {"common_step": torch.tensor(97.0)}} if tp == 2 else {}
    common = {"optimizer": {"optimizer": {**step, "param_groups": [{"lr": 0.1}]}}}
    writer = write_folder(folder, half(), tp=tp, stacked=stacked, common=common)
    moments = {"exp_avg": {n: t * 2 for n, t in truth().items()}, "exp_avg_sq": {n: t / 4 for n, t in truth().items()}}
    for kind, tensors in moments.items():
        add(writer, padded(tensors), prefix=f"optimizer.state.{kind}.", tp=tp, stacked=stacked)
    norms = {name for name in truth() if "ln_" in name and tp == 1}  # were float32 already
    layers = {name: tensor for name, tensor in truth().items() if name not in norms}
    add(writer, padded(layers), prefix=master, tp=tp, stacked=stacked)
    writer.close()
    source = open_folder(folder, Options())
    assert_equal(merged(source), layers | {name: half()[name] for name in norms})
    for kind, tensors in moments.items():
        assert_equal(merged(source, kind), tensors)
    assert f"{len(layers)} of 52 tensors" in source.notes[0]
    assert (source.step, len(source.notes)) == ((97, 1) if step else (100, 2))  # the iteration, if it is not recorded


def test_a_gap_between_flattened_parts_is_refused(folder: Path) -> None:
    writer = write_folder(folder, half())
    add_flattened(writer, padded(truth()), "optimizer.state.fp32_param.")
    key = "optimizer.state.fp32_param.embedding.word_embeddings.weight"
    chunks_of(writer.metadata, key).pop()
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


def test_extra_state_and_rng_state_are_never_read(folder: Path, tmp_path: Path) -> None:
    writer = write_folder(folder, truth())
    for key in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", "rng_state/shard_0.0_1.1", "rerun_state"):
        writer.add_object(7, key, Touch(tmp_path / "mark"))
    writer.close()
    (folder / "__7_0.distcp").unlink()
    assert_equal(merged(open_folder(folder, Options())), truth())


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
        (rename("decoder.layers.mlp.router.weight"), ["decoder.layers.mlp.router.weight", "[32]"]),
        (rename("rng_state"), ["'ln_f.bias'"]),
        (rename(f"model.{BIAS}", keep=True), [f"model.{BIAS}"]),
    ],
    ids=["chunk", "record", "overlap", "size", "unknown", "missing", "twice"],
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
