"""Written folders load in transformers with equal logits, bit for bit the same whatever layout they come from."""

import errno
import json
import logging
import math
import shutil
from collections.abc import Iterator
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
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

from common.errors import CheckpointError, InputError
from common.folders import replace_folder
from common.settings import ModelSettings
from common.tokenizer import Tokenizer, TokenizerJson
from common.tokenizer_json import to_json
from convert import ahead
from convert.files.stored import LoadedTensor
from convert.sources.huggingface import open_folder
from convert.sources.options import Options
from convert.sources.source import Architecture, Block, Sharded, Source, whole
from convert.targets.huggingface import parse_size, split_into_shards, write_folder, write_weights
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from training.checkpoint.storage import HashedFile
from training.inference.load import load_model, model_from_weights


def folder_of(tmp_path: Path, source: Source, name: str = "merged", **options: Any) -> Path:
    """The written folder."""
    folder = tmp_path / name
    folder.mkdir()
    write_folder(folder, source, **options)
    return folder


def logits_of(weights: dict[str, Tensor], model: Architecture, tokens: Tensor) -> Tensor:
    """By our own GPT-2, which has another layout."""
    settings = ModelSettings(
        n_layer=model.n_layer,
        n_head=model.n_head,
        n_embd=model.n_embd,
        seq_len=model.n_positions,
        vocab_size=model.vocab_size,
    )
    return model_from_weights(settings, weights)(tokens)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What transformers logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("transformers").addHandler(handler)
    yield found
    logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize(("ranks", "limit"), [(1, "1GB"), (4, "1GB"), (2, "40KB"), (8, "1KB")])
def test_transformers_loads_the_folder_with_equal_logits_and_no_warning(
    tmp_path: Path, ranks: int, limit: str, messages: list[str]
) -> None:
    folder = folder_of(tmp_path, source_of(truth(), tensor=ranks), max_shard_size=parse_size(limit))
    theirs, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and not messages
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokens = torch.randint(SMALL.vocab_size, (2, SMALL.n_positions), generator=torch.Generator().manual_seed(1))
    expected = logits_of(truth(), SMALL, tokens)
    assert (theirs.eval()(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(list(folder.glob("*.safetensors"))) == 1 or limit != "1GB"


def test_equal_weights_give_equal_files_whatever_layout_they_come_from(tmp_path: Path) -> None:
    """Also from what was written: reading and writing again changes nothing, with or without other files in between."""
    first = folder_of(tmp_path, source_of(truth()))
    sources = {
        "eight ranks": source_of(truth(), tensor=8),
        "written": open_folder(first, Options()),
        "parts": open_folder(folder_of(tmp_path, source_of(truth()), "split", max_shard_size=9000), Options()),
    }
    for name, source in sources.items():
        again = folder_of(tmp_path, source, name)
        assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
        for path in first.iterdir():
            assert path.read_bytes() == (again / path.name).read_bytes(), (name, path.name)


def test_config_has_what_transformers_vllm_and_llama_cpp_read(tmp_path: Path) -> None:
    model = replace(SMALL, activation="gelu", layer_norm_epsilon=1e-6, dropout=0.2, n_inner=96)
    weights = truth(model)
    config = json.loads(
        (folder_of(tmp_path, source_of(weights, model), dtype=torch.bfloat16) / "config.json").read_text()
    )
    expected = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 300,  # true tokens, not padded
        "n_positions": 24,
        "n_ctx": 24,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 8,
        "n_inner": 96,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-6,
        "resid_pdrop": 0.2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "scale_attn_weights": True,
        "add_cross_attention": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert expected.items() <= config.items()


def test_the_default_keeps_the_type_bit_for_bit(tmp_path: Path) -> None:
    """Every bit pattern of float16 survives, NaNs with their payload too."""
    weights = {name: tensor.half() for name, tensor in truth().items()}
    bits = torch.arange(2**16)[torch.randperm(2**16)[: 300 * 32]].to(torch.int16)
    weights["wte.weight"] = bits.view(torch.float16).view(300, 32)
    folder = folder_of(tmp_path, source_of(weights, tensor=2))
    read = weights_of(folder)
    assert {tensor.dtype for tensor in read.values()} == {torch.float16}
    assert torch.equal(read["transformer.wte.weight"].view(torch.int16).flatten(), bits)
    assert torch.equal(read["transformer.h.1.mlp.c_fc.weight"], weights["h.1.mlp.c_fc.weight"].t())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_mixed_types_become_the_one_that_holds_all(tmp_path: Path) -> None:
    weights = {name: tensor.half() if "ln_" not in name else tensor.bfloat16() for name, tensor in truth().items()}
    read = weights_of(folder_of(tmp_path, source_of(weights)))
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    for name in ("wte.weight", "ln_f.bias"):
        assert torch.equal(read[f"transformer.{name}"], weights[name].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_type_is_chosen(tmp_path: Path, dtype: torch.dtype) -> None:
    read = weights_of(folder_of(tmp_path, source_of(truth(), tensor=2), dtype=dtype))
    assert torch.equal(read["transformer.wpe.weight"], truth()["wpe.weight"].to(dtype))
    assert {tensor.dtype for tensor in read.values()} == {dtype}


def test_a_value_that_the_type_cannot_hold_is_refused_with_tensor_and_value(tmp_path: Path) -> None:
    weights = truth()
    weights["h.2.mlp.c_proj.weight"][5, 7] = -70000.0
    weights["h.2.mlp.c_proj.weight"][5, 8] = math.inf
    says = r"tensor 'h\.2\.mlp\.c_proj\.weight': its largest value, 70000, is too large for float16 \(65504 at most\)"
    with pytest.raises(CheckpointError, match=says):
        folder_of(tmp_path, source_of(weights, tensor=2), dtype=torch.float16)
    folder_of(tmp_path, source_of(weights), "other", dtype=torch.bfloat16)
    weights["h.2.mlp.c_proj.weight"][5, 7] = 1.0
    read = weights_of(
        folder_of(tmp_path, source_of(weights), "infinite", dtype=torch.float16)
    )  # it was infinite before
    assert read["transformer.h.2.mlp.c_proj.weight"].isinf().sum() == 1


def test_an_untied_head_is_written_and_used(tmp_path: Path) -> None:
    model = replace(SMALL, tied=False)
    weights = truth(model)
    folder = folder_of(tmp_path, source_of(weights, model, tensor=2))
    assert torch.equal(weights_of(folder)["lm_head.weight"], weights["lm_head.weight"])
    theirs, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(theirs.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(theirs.transformer.wte.weight, weights["wte.weight"])


def test_vocabulary_padding_is_left_out(tmp_path: Path) -> None:
    weights = truth()
    source = source_of(weights | {"wte.weight": torch.cat([weights["wte.weight"], torch.ones(84, 32)])}, tensor=4)
    assert source.tensors["wte.weight"].shape == (384, 32)
    assert torch.equal(weights_of(folder_of(tmp_path, source))["transformer.wte.weight"], weights["wte.weight"])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_shards_are_those_of_transformers(sizes: list[int], limit: int) -> None:
    tensors = {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    ours = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    assert ours == list(theirs.filename_to_tensors.values())


def test_the_index_names_every_tensor_and_the_sizes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, source_of(truth()), dtype=torch.float16, max_shard_size=50_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    count = sum(tensor.numel() for tensor in truth().values())
    assert index["metadata"] == {"total_parameters": count, "total_size": 2 * count}
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert len(index["weight_map"]) == len(truth())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 kb", 1500), ("7", 7), ("2tb", 2 * 10**12)]
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0MB", "5GiB", "5 G B", "1e9"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size such as 5GB"):
        parse_size(text)


def test_gpt2s_vocabulary_is_added_and_a_pipeline_generates_text(tmp_path: Path, messages: list[str]) -> None:
    model = Architecture(n_layer=1, n_head=1, n_embd=4, n_positions=16, n_inner=16, vocab_size=50257)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: torch.empty(tensor.shape).normal_(0, 0.5, generator=generator) for name, tensor in truth(model).items()
    }
    folder = folder_of(tmp_path, source_of(weights, model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 50256 and tokenizer("Hello world")["input_ids"] == [15496, 995]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (50256, 50256)
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()
    generate = pipeline("text-generation", model=str(folder))
    (found,) = generate("Hello world", max_new_tokens=5, do_sample=False, return_full_text=False)
    ours, same = load_model(folder)
    tokens = [15496, 995]
    for _ in range(5):
        tokens.append(int(ours(torch.tensor([tokens]))[0, -1].argmax()))
    assert same is not None and found["generated_text"] == same.decode(tokens[2:])
    assert not [message for message in messages if "pad_token_id" not in message]


def test_a_tokenizer_json_alone_gives_vocab_json_and_merges_too(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(to_json(Tokenizer().vocabulary)))
    model = Architecture(n_layer=1, n_head=1, n_embd=2, n_positions=8, n_inner=8, vocab_size=50257)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in truth(model).items()}
    folder = folder_of(tmp_path, source_of(weights, model, tokenizer=Tokenizer(TokenizerJson(tmp_path / "t.json"))))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert AutoTokenizer.from_pretrained(folder)("Hello world")["input_ids"] == [15496, 995]
    assert load_model(folder)[1] is not None


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = HashedFile.write

    def fill(self: HashedFile, data: object) -> int:
        if self.size > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return write(self, data)

    monkeypatch.setattr(HashedFile, "write", fill)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors"):
        with replace_folder(tmp_path / "merged", lambda old, new: None) as temporary:
            write_folder(temporary, source_of(truth()))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"will be written, but only 0\.0 GB are free"):
        write_weights(tmp_path, source_of(truth()))


class Spied(LoadedTensor):
    """Records when it is read."""

    events: list[str]
    name: str

    def read(self) -> Tensor:
        self.events.append(f"read {self.name}")
        return super().read()


def spied(events: list[str]) -> Source:
    """A source that records what is read."""
    tensors: dict[str, Sharded] = {}
    for name, tensor in truth().items():
        stored = Spied(tensor)
        object.__setattr__(stored, "events", events)
        object.__setattr__(stored, "name", name)
        tensors[name] = Sharded(tuple(tensor.shape), (Block((0,) * tensor.dim(), stored),))
    return source_of({}, tensors=tensors)


@pytest.mark.parametrize(("spare", "most"), [(512 << 20, 5), (-(10**9), 0)])
def test_tensors_are_assembled_ahead_only_if_there_is_room(
    tmp_path: Path, spare: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than five, and none if two tensors exceed the memory."""
    monkeypatch.setattr(ahead, "_SPARE", spare)
    events: list[str] = []
    write_weights(tmp_path, spied(events), progress=lambda count: events.append("written"))
    reads = [event for event in events if event != "written"]
    assert len(reads) == len(truth())
    for number, event in enumerate(reads):
        assert number - events[: events.index(event)].count("written") <= most, event


def test_a_tensor_whose_parts_have_different_types_is_named(tmp_path: Path) -> None:
    weights = truth()
    halves = weights["h.0.mlp.c_fc.weight"].split(64)
    parts = (Block((0, 0), LoadedTensor(halves[0])), Block((64, 0), LoadedTensor(halves[1].half())))
    source = source_of(weights)
    mixed = {
        **source.tensors,
        "h.0.mlp.c_fc.weight": Sharded((128, 32), parts),
        "ln_f.bias": whole(LoadedTensor(weights["ln_f.bias"])),
    }
    with pytest.raises(CheckpointError, match=r"tensor 'h\.0\.mlp\.c_fc\.weight': its parts have different types"):
        folder_of(tmp_path, replace(source, tensors=mixed))
