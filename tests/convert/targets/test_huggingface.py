"""Written folders load in transformers with equal logits; equal weights give equal files."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from common.errors import CheckpointError, InputError
from common.tokenizer import Tokenizer
from common.vocabulary import to_json
from convert.arguments import Options
from convert.merge_mp import parse_size
from convert.sources.huggingface import open_folder
from convert.sources.source import Architecture, Source
from convert.targets.huggingface import SPECIAL_TOKENS, split_into_shards, write_folder
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import as_conv1d, source_of


def folder_of(tmp_path: Path, source: Source, name: str = "merged", **options: Any) -> Path:
    """The written folder."""
    folder = tmp_path / name
    folder.mkdir()
    write_folder(folder, source, **options)
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("ranks", "limit", "tied"), [(4, "1GB", True), (2, "40KB", False), (8, "1KB", True)])
def test_transformers_loads_every_weight_without_a_warning(
    tmp_path: Path, ranks: int, limit: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = replace(SMALL, tied=tied)
    weights = truth(model)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    folder = folder_of(tmp_path, source_of(weights, model, tensor=ranks), max_shard_size=parse_size(limit))
    theirs, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    logger.removeHandler(caplog.handler)
    assert not any(report.values()) and not caplog.records
    assert (theirs.lm_head.weight is theirs.transformer.wte.weight) == tied
    loaded = {name.removeprefix("transformer."): value for name, value in theirs.state_dict().items()}
    laid_out = as_conv1d(weights, model).tensors
    for name in weights:
        assert torch.equal(loaded[name], laid_out[name].read()), name
    if limit != "1GB":
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in weights.values())


def test_equal_weights_give_equal_files_whatever_layout_they_come_from(tmp_path: Path) -> None:
    """Reading and writing again changes nothing, with or without other files in between."""
    first = folder_of(tmp_path, source_of(truth()))
    sources = {
        "eight ranks": source_of(truth(), tensor=8),
        "conv1d": as_conv1d(truth()),
        "written": open_folder(first, Options()),
        "parts": open_folder(folder_of(tmp_path, source_of(truth()), "split", max_shard_size=9000), Options()),
    }
    for name, source in sources.items():
        again = folder_of(tmp_path, source, name)
        assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
        for path in first.iterdir():
            assert path.read_bytes() == (again / path.name).read_bytes(), (name, path.name)


def test_the_default_keeps_the_type_bit_for_bit_and_mixed_types_become_the_one_that_holds_all(tmp_path: Path) -> None:
    """Every bit pattern of float16 survives, NaNs with their payload too."""
    weights = {name: tensor.half() for name, tensor in truth().items()}
    bits = torch.arange(2**16)[torch.randperm(2**16)[: 300 * 32]].to(torch.int16)
    weights["wte.weight"] = bits.view(torch.float16).view(300, 32)
    read = weights_of(folder_of(tmp_path, source_of(weights, tensor=2)))
    assert {tensor.dtype for tensor in read.values()} == {torch.float16}
    assert torch.equal(read["transformer.wte.weight"].view(torch.int16).flatten(), bits)
    mixed = truth() | {"ln_f.bias": truth()["ln_f.bias"].bfloat16(), "wte.weight": truth()["wte.weight"].half()}
    read = weights_of(folder_of(tmp_path, source_of(mixed), "mixed"))
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    assert torch.equal(read["transformer.wte.weight"], mixed["wte.weight"].float())


def test_a_value_that_the_type_cannot_hold_is_refused_with_tensor_and_value(tmp_path: Path) -> None:
    weights, name = truth(), "h.2.mlp.c_proj.weight"
    weights[name][5, 7:9] = torch.tensor([-65504.0, math.inf])  # the largest of float16; infinite before
    read = weights_of(folder_of(tmp_path, source_of(weights), dtype=torch.float16))
    assert read[f"transformer.{name}"].isinf().sum() == 1
    weights[name][5, 7] = -70000.0
    with pytest.raises(CheckpointError, match=f"'{name}'.* 70000,.* float16"):
        folder_of(tmp_path, source_of(weights, tensor=2), "large", dtype=torch.float16)
    read = weights_of(folder_of(tmp_path, source_of(weights), "other", dtype=torch.bfloat16))
    assert torch.equal(read[f"transformer.{name}"], weights[name].bfloat16().t())
    brain = source_of({key: value.bfloat16() for key, value in weights.items()})
    with pytest.raises(CheckpointError, match=f"'{name}'.* float16"):  # equally wide, a smaller range
        folder_of(tmp_path, brain, "brain", dtype=torch.float16)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_shards_are_those_of_transformers(sizes: list[int], limit: int) -> None:
    tensors = {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    ours = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    assert ours == list(theirs.filename_to_tensors.values())


@pytest.mark.parametrize("own", [False, True])
def test_gpt2s_vocabulary_is_added_or_kept_and_transformers_reads_either_form(tmp_path: Path, own: bool) -> None:
    (tmp_path / "t.json").write_text(json.dumps(to_json(Tokenizer().vocabulary)))
    model = Architecture(n_layer=1, n_head=1, n_embd=2, n_positions=8, n_inner=8, vocab_size=50257)
    tokenizer = Tokenizer(tmp_path / "t.json") if own else None
    folder = folder_of(tmp_path, source_of(truth(model), model, tokenizer=tokenizer))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        assert [content[key] for key in SPECIAL_TOKENS] == [50256] * 3
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == 50256 and theirs("Hello world")["input_ids"] == [15496, 995]
    assert theirs(["Hello world", "Hello"], padding=True)["input_ids"][1] == [15496, 50256]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert AutoTokenizer.from_pretrained(folder)("Hello world")["input_ids"] == [15496, 995]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=4 * sum(tensor.numel() for tensor in truth().values()) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(InputError, match="free"):
        write_folder(tmp_path, source_of(truth()))
    assert not list(tmp_path.iterdir())
    free = free._replace(free=free.free + 1)
    write_folder(tmp_path, source_of(truth()))
