"""Megatron-core's torch_dist folders: every layout gives the same model, and damage is one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from common.errors import CheckpointError
from convert import verify
from convert.arguments import Options
from convert.sources.torch_dist import matches, open_folder
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import merged, refused
from tests.convert.sources.torch_dist_files import (
    add_flattened,
    add_model,
    arguments,
    padded,
    write_backend,
    write_folder,
)
from tests.training.checkpoint.planted import Touch, metadata_of, write_metadata
from training.checkpoint.files import StoredTensor
from training.tensors import leaf_of


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
def test_every_layout_gives_the_same_model(
    folder: Path, tp: int, pp: int, stacked: bool, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(SMALL, tied=tp != 4)
    said = {"untie_embeddings_and_output_weights": not model.tied}
    writer = write_folder(folder, truth(model), args=said, tp=tp, pp=pp, stacked=stacked, prefix=prefix)
    for key in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", "rng_state/shard_0.0_1.1", "rerun_state"):
        writer.add_object(99, key, Touch(folder / "mark"))  # never read
    writer.close()
    (folder / "__99_0.distcp").unlink()
    assert matches(folder)
    with monkeypatch.context() as patch:
        patch.setattr(StoredTensor, "read", None)  # nothing but the heads of the records is read
        source = open_folder(folder, Options())
    assert_equal(merged(source), truth(model), model)
    assert source.model == model and source.notes == ()
    assert (source.iteration, source.consumed_samples, source.step) == (100, 6400, None)
    assert source.has_moments("adamw") is False
    assert f"tensor {tp} x pipeline {pp}" in source.layout and ("stacked" in source.layout) == stacked
    assert {path.name for path in source.files} == {
        ".metadata",
        "common.pt",
        "metadata.json",
        *(f"__{rank}_0.distcp" for rank in range(tp * pp)),
    }


def test_the_common_part_may_be_an_object_among_the_tensors(folder: Path) -> None:
    writer = write_folder(folder, truth())
    (folder / "common.pt").unlink()
    args = arguments(SMALL, hidden_dropout=0.2, attention_dropout=0.2, layernorm_zero_centered_gamma=False)
    writer.add_object(0, "common_state/shard_0_1", [{"args": args, "iteration": 100, "checkpoint_version": 3.0}])
    writer.close()
    source = open_folder(folder, Options())
    assert (source.model.n_head, source.model.dropout, source.iteration) == (8, 0.2, 100)
    assert_equal(merged(source), truth())


def test_without_a_common_part_heads_and_vocabulary_must_be_given(folder: Path) -> None:
    write_folder(folder, truth()).close()
    (folder / "common.pt").unlink()
    refused(folder, "--num-heads")
    assert open_folder(folder, Options(num_heads=8, vocab_size=300)).model == SMALL


@pytest.mark.parametrize(
    ("add", "tp", "stacked", "master"),
    [
        (add_model, 2, True, "optimizer.state.fp32_param."),
        (add_model, 1, False, "chained_0.optimizer.state.param."),
        (add_flattened, 2, False, "optimizer.state.fp32_param."),
    ],
)
def test_masters_and_moments_are_read(folder: Path, add: Any, tp: int, stacked: bool, master: str) -> None:
    """Until 0.15 as [parts along each dimension, elements of a part], cut anywhere in the last."""
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


@pytest.mark.parametrize("chained", [True, False])
def test_muons_momenta_lie_beside_adams_moments_and_other_state_is_named(folder: Path, chained: bool) -> None:
    """As one optimizer, or as two in a chain, of which the second counts the steps."""
    groups = [{"param_groups": [{"lr": 0.1}]}, {"state": {"common_step": torch.tensor(97.0)}, "param_groups": []}]
    common = {"optimizer": {number: {"optimizer": group} for number, group in enumerate(groups)}}
    writer = write_folder(folder, truth(), tp=2, common=common)
    muon, adam = "chained_0." * chained, "chained_1." * chained
    matrices = {name: tensor * 2 for name, tensor in truth().items() if leaf_of(name).conv1d or name == "wpe.weight"}
    others = {name: tensor * 3 for name, tensor in truth().items() if name not in matrices}
    add_model(writer, matrices, prefix=f"{muon}optimizer.state.momentum_buffer.", tp=2)
    add_model(writer, {"wpe.weight": matrices["wpe.weight"]}, prefix=f"{muon}optimizer.state.moment2.")
    for kind in ("exp_avg", "exp_avg_sq"):
        add_model(writer, padded(others), prefix=f"{adam}optimizer.state.{kind}.", tp=2)
    writer.close()
    source = open_folder(folder, Options())
    assert_equal(merged(source, "exp_avg"), matrices | others)
    assert_equal(merged(source, "exp_avg_sq"), others)
    assert (source.step, source.estimated, source.has_moments("muon")) == (97, ("wpe.weight",), True)
    assert not source.has_moments("adamw")
    (note,) = source.notes
    assert note == "optimizer state 'moment2' is left out: neither AdamW nor Muon has it"


def test_a_gap_between_flattened_parts_is_refused(folder: Path) -> None:
    writer = write_folder(folder, half())
    add_flattened(writer, padded(truth()), "optimizer.state.fp32_param.")
    key = "optimizer.state.fp32_param.embedding.word_embeddings.weight"
    chunks_of(writer.metadata, key).pop()
    writer.close()
    refused(folder, ".metadata", repr(key))


FC1, BIAS = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.bias"


def chunks_of(metadata: Metadata, key: str = FC1) -> list[ChunkStorageMetadata]:
    described = metadata.state_dict_metadata[key]
    assert isinstance(described, TensorStorageMetadata)
    return described.chunks


def test_a_damaged_moment_in_a_file_of_its_own_is_found_by_verify(folder: Path) -> None:
    writer = write_folder(folder, truth())
    writer.add(9, f"optimizer.state.exp_avg.{BIAS}", (32,), (0,), torch.ones(32))
    writer.close()
    path, ones, zeros = folder / "__9_0.distcp", torch.ones(32).numpy().tobytes(), bytes(128)
    path.write_bytes(path.read_bytes().replace(ones, zeros))
    with pytest.raises(CheckpointError, match=path.name):
        list(verify.check(folder))


Change = Callable[[Metadata], object]
CONTRADICTIONS: list[tuple[Change, dict[str, Any], list[str]]] = [
    (lambda metadata: chunks_of(metadata).pop(1), {}, [FC1, "[4, 128, 32]"]),
    (lambda metadata: chunks_of(metadata).append(chunks_of(metadata)[0]), {}, [FC1, "[4, 128, 32]"]),
    (lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))), {}, ["word_embeddings", "[0, 0]"]),
    (lambda metadata: setattr(metadata.state_dict_metadata[FC1], "size", (4, 96, 32)), {}, [FC1, "[4, 96, 32]"]),
    (lambda metadata: metadata.state_dict_metadata.pop(BIAS), {}, ["'ln_f.bias'"]),
    (lambda metadata: None, {"common": {"iteration": 200}}, ["iter_0000100", "iteration 200"]),
    (lambda metadata: None, {"args": {"num_layers": 5}}, ["args.num_layers is 5", "4"]),
]


@pytest.mark.parametrize(
    ("damage", "said", "parts"), CONTRADICTIONS, ids=["chunk", "overlap", "record", "size", "missing", "common", "args"]
)
def test_what_contradicts_the_records_or_the_model_is_refused(
    folder: Path, damage: Change, said: dict[str, Any], parts: list[str]
) -> None:
    write_folder(folder, truth(), tp=2, pp=2, **said).close()
    metadata = metadata_of(folder)
    damage(metadata)
    write_metadata(folder, metadata)
    refused(folder, *parts)


def test_another_backend_is_named(tmp_path: Path) -> None:
    write_backend(tmp_path, "zarr")
    assert matches(tmp_path)
    refused(tmp_path, "'zarr'")
