"""Folders of every age of transformers are read lazily, bit for bit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from convert.arguments import Options
from convert.assemble import assemble
from convert.sources.huggingface import matches, open_folder
from convert.sources.source import QKV, Source
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import as_conv1d, merged, refused
from training.checkpoint.files import StoredTensor
from training.huggingface.origin import Origin, write_origin

SIZES = {key: getattr(SMALL, key) for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
CONFIG = {"model_type": "gpt2", **SIZES}
PARTS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def theirs(prefix: str = "", weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Hugging Face's layout of our weights: [in, out], columns of c_attn [(q, k, v), head, dim]."""
    tensors = as_conv1d(weights or truth()).tensors
    return {prefix + name: tensor.read() for name, tensor in tensors.items()}


def make(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """A folder with one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def read(folder: Path, **options: Any) -> Source:
    assert matches(folder)
    return open_folder(folder, Options(**options))


def save_parts(folder: Path, tensors: dict[str, Tensor], file: str) -> None:
    """One file, or three with an index; in the format before torch 1.6 if it is called old."""
    stem, ending = file.removeprefix("old ").rsplit(".", 1)
    names, weight_map = sorted(tensors), {}
    numbered = [stem.replace("00001", f"0000{number}") for number in (1, 2, 3)] if "-of-" in stem else [stem]
    for number, name in enumerate(numbered):
        part = {key: tensors[key] for key in names[number :: len(numbered)]}
        if ending == "safetensors":
            save_file(part, folder / f"{name}.{ending}")
        else:
            torch.save(part, folder / f"{name}.{ending}", _use_new_zipfile_serialization="old" not in file)
        weight_map |= dict.fromkeys(part, f"{name}.{ending}")
    if len(numbered) > 1:
        index = folder / f"{stem.partition('-')[0]}.{ending}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    ("file", "prefix"),
    [
        ("model.safetensors", "transformer."),
        (PARTS[0], ""),
        ("pytorch_model.bin", ""),
        ("old pytorch_model.bin", "transformer."),
        ("pytorch_model-00001-of-00003.bin", "transformer."),
    ],
)
def test_every_kind_of_file_is_read_bit_for_bit(tmp_path: Path, file: str, prefix: str) -> None:
    """With the masks that old files hold, and with a tied head beside the embedding."""
    tensors = theirs(prefix)
    masks = {
        f"{prefix}h.0.attn.bias": torch.ones(1, 1, 24, 24).tril(),
        f"{prefix}h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_parts(tmp_path, tensors | masks | {"lm_head.weight": tensors[f"{prefix}wte.weight"].clone()}, file)
    source = read(tmp_path)
    assert_equal(merged(source), truth())
    assert source.model == SMALL and (source.qkv, source.conv1d) == (QKV(0), True)
    if "old" not in file:
        assert isinstance(source.tensors["h.1.mlp.c_fc.weight"].blocks[0].tensor, StoredTensor)  # nothing was read
    assert all(path.is_file() for path in source.files)
    assert len(source.files) == (5 if "-of-" in file else 2)


def test_narrow_types_links_of_a_cache_and_the_origin_of_a_merge_are_read(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in truth().items()}
    blobs, snapshot = make(tmp_path / "blobs", theirs(weights=weights)), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    write_origin(snapshot, Origin(iteration=7, consumed_samples=56, split="949,50,1", data="abc"))
    source = read(snapshot)
    assert_equal(merged(source), weights)
    assert (source.iteration, source.consumed_samples, source.facts["split"]) == (7, 56, "949,50,1")


def test_what_transformers_writes_is_read_with_its_constants(tmp_path: Path) -> None:
    constants = {"n_inner": 48, "activation_function": "gelu", "layer_norm_epsilon": 1e-6, "resid_pdrop": 0.2}
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **constants, bos_token_id=1, eos_token_id=2)).eval()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    source = read(tmp_path)
    sizes = source.model
    assert (sizes.n_inner, sizes.activation, sizes.layer_norm_epsilon, sizes.dropout) == (48, "gelu", 1e-6, 0.2)
    assert (source.facts["bos_token_id"], source.facts["eos_token_id"]) == (1, 2)
    expected = model.transformer.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(assemble(source, name, qkv=QKV(0), conv1d=True), tensor), name
    assert sizes.tied and len(source.tensors) == len(expected)


def test_a_head_that_is_not_tied_is_kept_if_config_says_so(tmp_path: Path) -> None:
    head = torch.randn(SMALL.vocab_size, SMALL.n_embd)
    tensors = theirs("transformer.") | {"lm_head.weight": head}
    source = read(make(tmp_path, tensors, tie_word_embeddings=False))
    assert not source.model.tied and torch.equal(assemble(source, "lm_head.weight"), head)
    refused(make(tmp_path, tensors), "tie_word_embeddings is True")
    refused(make(tmp_path, theirs(), tie_word_embeddings=False), "tie_word_embeddings is False")
    same = {"lm_head.weight": theirs()["wte.weight"].clone()}
    assert read(make(tmp_path, tensors | same, tie_word_embeddings=False)).model.tied
    same["lm_head.weight"][-1, -1] += 1
    refused(make(tmp_path, tensors | same), "tie_word_embeddings is True")


def test_padding_rows_are_left_out_if_the_tokenizer_or_a_flag_says_how_many(tmp_path: Path) -> None:
    padded = theirs()
    padded["wte.weight"] = torch.cat([padded["wte.weight"], torch.ones(20, 32)])
    folder = make(tmp_path, padded, vocab_size=320)
    assert read(folder).model.vocab_size == 320 and not read(folder).notes
    told = read(folder, vocab_size=300)
    assert_equal(merged(told), truth())
    assert len(told.notes) == 1
    (folder / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(297)}))
    (folder / "merges.txt").write_text("")
    assert read(folder).model.vocab_size == 297
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 297, "<user>": 299}))
    assert read(folder).model.vocab_size == 300  # rows of added tokens are no padding
    refused(folder, "--vocab-size is 299", "300 tokens", vocab_size=299)
    refused(folder, "--vocab-size", "321", "320 rows", vocab_size=321)


Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def same(_tensors: Tensors) -> None:
    """No change."""


def twice(tensors: Tensors) -> None:
    tensors["transformer.wpe.weight"] = tensors["wpe.weight"].clone()


REFUSED: list[tuple[Change, dict[str, Any], list[str]]] = [
    (same, {"model_type": "llama"}, ["config.json", "model_type", "llama"]),
    (same, {"activation_function": "relu"}, ["config.json", "activation_function", "relu"]),
    (same, {"n_head": "8"}, ["config.json", "n_head", "8"]),
    (same, {"n_layer": 3}, ["config.json", "n_layer", "3"]),
    (same, {"resid_pdrop": 1.0}, ["config.json", "resid_pdrop", "1.0"]),
    (same, {"n_head": 5}, ["5 heads"]),
    (same, {"n_head": None}, ["--num-heads"]),
    (lambda named: named.pop("h.2.ln_1.bias"), {}, ["'h.2.ln_1.bias'"]),
    (lambda named: named.update({"score.weight": torch.zeros(2)}), {}, ["'score.weight'"]),
    (twice, {}, ["wpe.weight", "twice"]),
    (lambda named: named.update({"wpe.weight": torch.ones(24, 32).to(torch.int8)}), {}, ["'wpe.weight'", "int8"]),
    (lambda named: named.update({"h.1.attn.c_proj.weight": torch.ones(32, 31)}), {}, ["c_proj.weight'", "[32, 31]"]),
]


@pytest.mark.parametrize(("change", "config", "parts"), REFUSED, ids=[" ".join(parts) for *_, parts in REFUSED])
def test_what_is_no_gpt2_is_refused_by_key_or_tensor(
    tmp_path: Path, change: Change, config: dict[str, Any], parts: list[str]
) -> None:
    tensors = theirs()
    change(tensors)
    refused(make(tmp_path, tensors, **config), *parts)


def test_a_flag_that_contradicts_the_folder_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, theirs(), activation_function="gelu_pytorch_tanh")
    refused(folder, "--num-heads is 4", "n_head 8", num_heads=4)
    refused(folder, "--activation is gelu", "gelu_pytorch_tanh", activation="gelu")
    refused(folder, "--qkv-version is 3", qkv_version=3)
    assert read(folder, num_heads=8, activation="gelu_new", qkv_version=0).model.n_head == 8


def test_damaged_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    config.write_text(json.dumps(CONFIG))
    refused(tmp_path, "model.safetensors", "pytorch_model.bin")
    save_parts(tmp_path, theirs(), PARTS[0])
    second = tmp_path / PARTS[1]
    second.write_bytes(second.read_bytes()[:-5])
    refused(tmp_path, f"{second}: cut off")
    second.unlink()
    refused(tmp_path, PARTS[1], index.name)
    name, tensor = next(iter(sorted(load_file(tmp_path / PARTS[0]).items())))
    save_file({name: tensor}, second)
    refused(tmp_path, repr(name), PARTS[0])
    for listed in ('{"weight_map": {"wte.weight": "../model.safetensors"}}', "{"):
        index.write_text(listed)
        refused(tmp_path, index.name)
    config.write_text("{")
    refused(tmp_path, config.name)
    config.write_text(json.dumps(CONFIG))
    for path in (index, *tmp_path.glob("*.safetensors")):
        path.unlink()
    for content in ([1], {"wte.weight": 3}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        refused(tmp_path, "pytorch_model.bin")
