"""torch_dist folders that are written: read back bit for bit, by our reader and by DCP."""

import argparse
import errno
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from common.errors import CheckpointError
from convert.assemble import HUGGING_FACE, assemble
from convert.files.stored import LoadedTensor
from convert.sources import torch_dist as reader
from convert.sources.options import Options
from convert.sources.source import QKV, Architecture, Sharded, Source, whole
from convert.targets import torch_dist
from convert.targets.torch_dist import write
from tests.convert.encoded import SMALL, assert_equal, truth
from training.checkpoint.storage import HashedFile


def source_of(weights: dict[str, Tensor], model: Architecture = SMALL, **changes: Any) -> Source:
    """A model in memory, in our layout."""
    tensors: dict[str, Sharded] = {name: whole(LoadedTensor(tensor)) for name, tensor in weights.items()}
    source = Source(Path("memory"), "memory", model, QKV(3), tensors, (), iteration=100, consumed_samples=1600)
    return replace(source, **changes)


def read_back(folder: Path, name: str = "iter_0000100") -> Source:
    return reader.open_folder(folder / name, Options())


def merged(source: Source) -> dict[str, Tensor]:
    return {name: assemble(source, name) for name in source.tensors}


@pytest.mark.parametrize(("tp", "rows"), [(1, 384), (2, 512), (4, 512), (8, 1024)])
def test_what_is_written_reads_back_bit_for_bit(tmp_path: Path, tp: int, rows: int) -> None:
    write(source_of(truth()), tmp_path, tp=tp, pp=2)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    found = read_back(tmp_path)
    assert_equal(merged(found), truth())
    assert found.model == SMALL and (found.iteration, found.consumed_samples) == (100, 1600)
    assert found.tensors["wte.weight"].shape == (rows, 32) and found.notes == ()
    assert found.layout == f"Megatron-core torch_dist, 4 layers (stacked), written by tensor {tp} x pipeline 2"


@settings(max_examples=25)
@given(
    n_layer=st.integers(1, 3),
    n_head=st.sampled_from([1, 2, 4]),
    dim=st.integers(1, 5),
    positions=st.integers(1, 9),
    vocab_size=st.integers(2, 300),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    qkv=st.sampled_from([QKV(0), QKV(1), QKV(3)]),
)
def test_any_model_survives_the_round_trip(
    n_layer: int,
    n_head: int,
    dim: int,
    positions: int,
    vocab_size: int,
    tied: bool,
    dtype: torch.dtype,
    qkv: QKV,
) -> None:
    width = n_head * dim
    model = Architecture(n_layer, n_head, width, positions, 2 * width + 4, vocab_size, tied=tied)
    weights = {name: tensor.to(dtype) for name, tensor in truth(model).items()}
    source = source_of(weights, model, qkv=qkv)
    with TemporaryDirectory() as name:
        write(source, Path(name), tp=1, pp=1)
        found = read_back(Path(name))
        assert found.model == model
        for tensor in weights:
            for order in (HUGGING_FACE, QKV(3)):
                assert torch.equal(assemble(found, tensor, qkv=order), assemble(source, tensor, qkv=order)), tensor


def test_dcps_own_reader_reads_it_and_padding_repeats_the_last_token(tmp_path: Path) -> None:
    write(source_of(truth()), tmp_path, tp=2, pp=1)
    found = {
        "embedding.word_embeddings.weight": torch.empty(512, 32),
        "decoder.layers.mlp.linear_fc2.weight": torch.empty(4, 32, 128),
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load(found, checkpoint_id=tmp_path / "iter_0000100", no_dist=True)
    rows = found["embedding.word_embeddings.weight"]
    assert torch.equal(rows[:300], truth()["wte.weight"])
    assert torch.equal(rows[300:], truth()["wte.weight"][-1:].expand(212, -1))
    stacked = torch.stack([truth()[f"h.{layer}.mlp.c_proj.weight"] for layer in range(4)])
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], stacked)


def test_a_source_without_an_iteration_becomes_a_release(tmp_path: Path) -> None:
    write(source_of(truth(), iteration=None, consumed_samples=None), tmp_path, tp=1, pp=1)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert_equal(merged(read_back(tmp_path, "release")), truth())


def test_an_untied_head_and_other_constants_are_kept(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False, activation="gelu", layer_norm_epsilon=1e-6, dropout=0.0)
    write(source_of(truth(model), model), tmp_path, tp=4, pp=4)
    found = read_back(tmp_path)
    assert found.model == model
    assert_equal(merged(found), truth(model), model)


def test_what_megatron_compares_on_loading_is_recorded(tmp_path: Path) -> None:
    """The attributes that Megatron-LM's check_checkpoint_args reads, and the file that names the backend."""
    write(source_of(truth()), tmp_path, tp=2, pp=2)
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(tmp_path / "iter_0000100/common.pt", weights_only=True)
    args = common["args"]
    assert (args.num_layers, args.hidden_size, args.num_attention_heads, args.max_position_embeddings) == (4, 32, 8, 24)
    assert (args.make_vocab_size_divisible_by, args.padded_vocab_size, args.add_position_embedding) == (128, 512, True)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (common["iteration"], common["checkpoint_version"]) == (100, 3.0)
    assert json.loads((tmp_path / "iter_0000100/metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_large_models_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "_FILE", 1 << 16)
    write(source_of(truth()), tmp_path, tp=1, pp=1)
    assert len(list((tmp_path / "iter_0000100").glob("__0_*.distcp"))) > 3
    assert_equal(merged(read_back(tmp_path)), truth())


@pytest.mark.parametrize(
    ("changes", "sizes", "problem"),
    [
        ({}, (3, 1), "--tp 3 does not divide the 8 heads of memory"),
        ({"n_inner": 126}, (4, 1), "--tp 4 does not divide the 126 columns of the MLP of memory"),
        ({}, (1, 3), "--pp 3 does not divide the 4 layers of memory"),
        ({"activation": "relu"}, (1, 1), "has no activation relu, only GELU"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(
    tmp_path: Path, changes: dict[str, Any], sizes: tuple[int, int], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        write(source_of(truth(), replace(SMALL, **changes)), tmp_path, tp=sizes[0], pp=sizes[1])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self._file, self.fileno, self.close = file, file.fileno, file.close

        def write(self, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            pass

    class OnFullDisk(HashedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self._file = Full(self._file)  # type: ignore[assignment]

    monkeypatch.setattr(torch_dist, "HashedFile", OnFullDisk)
    with pytest.raises(OSError, match="No space left") as error:
        write(source_of(truth()), tmp_path, tp=1, pp=1)
    assert str(error.value.filename).endswith("__0_0.distcp")
