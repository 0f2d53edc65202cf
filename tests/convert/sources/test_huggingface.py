"""Folders of every age that transformers wrote, or that are written from the format's description, are read lazily."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model

from common.errors import CheckpointError, InputError
from common.tokenizer import Tokenizer
from convert.assemble import assemble
from convert.files.stored import StoredTensor
from convert.sources.huggingface import matches, open_folder
from convert.sources.options import Options
from convert.sources.source import QKV, Source
from convert.targets.huggingface import check_tokenizer, write_folder
from tests.convert.encoded import SMALL, assert_equal, truth
from tests.convert.helpers import source_of
from training.huggingface.origin import VOCABULARIES, Origin, write_origin

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": SMALL.vocab_size,
    "n_positions": SMALL.n_positions,
    "n_embd": SMALL.n_embd,
    "n_layer": SMALL.n_layer,
    "n_head": SMALL.n_head,
}
LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def theirs(weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Hugging Face's layout of our weights: [in, out], columns of c_attn [(q, k, v), head, dim]; no prefix."""
    found = {}
    for name, tensor in (weights or truth()).items():
        if ".c_attn." in name:
            heads = tensor.view(SMALL.n_head, 3, -1, *tensor.shape[1:])
            tensor = torch.cat([heads[:, part].flatten(0, 1) for part in range(3)])
        found[name] = (tensor.t() if name.endswith(LINEAR) else tensor).contiguous()
    return found


def make(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A folder with one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name if name == "lm_head.weight" else f"transformer.{name}": tensor for name, tensor in tensors.items()}


def read(folder: Path, **options: Any) -> Source:
    assert matches(folder)
    return open_folder(folder, Options(**options))


def weights_of(source: Source) -> dict[str, Tensor]:
    """In our layout."""
    return {name: assemble(source, name) for name in source.tensors}


def refused(folder: Path, says: str, **options: Any) -> None:
    """One line that says so."""
    with pytest.raises(CheckpointError, match=says) as error:
        read(folder, **options)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def as_safetensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def as_parts(folder: Path, tensors: dict[str, Tensor], ending: str = "safetensors", stem: str = "model") -> None:
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        file = f"{stem}-0000{number + 1}-of-00003.{ending}"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, folder / file) if ending == "safetensors" else torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def as_bin(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def as_old_bin(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_bin_parts(folder: Path, tensors: dict[str, Tensor]) -> None:
    as_parts(folder, tensors, "bin", "pytorch_model")


@pytest.mark.parametrize("save", [as_safetensors, as_parts, as_bin, as_old_bin, as_bin_parts])
@pytest.mark.parametrize("prefix", [True, False])
def test_every_kind_of_file_is_read_bit_for_bit(
    tmp_path: Path, save: Callable[[Path, dict[str, Tensor]], None], prefix: bool
) -> None:
    """With the masks that old files hold, and with a tied head beside the embedding."""
    tensors = prefixed(theirs()) if prefix else theirs()
    start = "transformer." if prefix else ""
    masks = {
        f"{start}h.0.attn.bias": torch.ones(1, 1, 24, 24).tril(),
        f"{start}h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save(tmp_path, tensors | masks | {"lm_head.weight": tensors[f"{start}wte.weight"].clone()})
    source = read(tmp_path)
    assert_equal(weights_of(source), truth())
    assert source.model == SMALL and (source.qkv, source.conv1d) == (QKV(0), True)
    stored = source.tensors["h.1.mlp.c_fc.weight"].blocks[0].tensor
    assert isinstance(stored, StoredTensor)  # nothing was read
    assert all(path.is_file() for path in source.files)
    assert len(source.files) == {"as_parts": 5, "as_bin_parts": 5}.get(save.__name__, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_stay_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in truth().items()}
    source = read(make(tmp_path, theirs(weights)))
    assert_equal(weights_of(source), weights)
    assert str(dtype).removeprefix("torch.") in source.layout


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, GPT2Model])
@pytest.mark.parametrize("limit", ["1GB", "30KB"])
def test_what_transformers_writes_is_read_with_its_constants(tmp_path: Path, kind: Any, limit: str) -> None:
    config = GPT2Config(
        **{key: value for key, value in CONFIG.items() if key != "model_type"},
        n_inner=48,
        activation_function="gelu",
        layer_norm_epsilon=1e-6,
        resid_pdrop=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = kind(config).eval()
    model.save_pretrained(tmp_path, max_shard_size=limit)
    source = read(tmp_path)
    found = source.model
    assert (found.n_inner, found.activation, found.layer_norm_epsilon, found.dropout) == (48, "gelu", 1e-6, 0.2)
    assert (source.facts["bos_token_id"], source.facts["eos_token_id"]) == (1, 2)
    expected = model.get_submodule("transformer" if kind is GPT2LMHeadModel else "").state_dict()
    for name, tensor in expected.items():
        assert torch.equal(assemble(source, name, qkv=QKV(0), conv1d=True), tensor), name
    assert found.tied and len(source.tensors) == len(expected)


def test_a_head_that_is_not_tied_is_kept_if_config_says_so(tmp_path: Path) -> None:
    head = torch.randn(SMALL.vocab_size, SMALL.n_embd)
    tensors = prefixed(theirs()) | {"lm_head.weight": head}
    source = read(make(tmp_path, tensors, tie_word_embeddings=False))
    assert not source.model.tied and torch.equal(assemble(source, "lm_head.weight"), head)
    refused(
        make(tmp_path, tensors), "'lm_head.weight' differs from 'wte.weight', but config.json says that they are tied"
    )
    refused(
        make(tmp_path, theirs(), tie_word_embeddings=False), "the head is not tied, but tensor 'lm_head.weight' is mis"
    )
    same = tensors | {"lm_head.weight": theirs()["wte.weight"]}
    assert read(make(tmp_path, same, tie_word_embeddings=False)).model.tied
    same["lm_head.weight"] = same["lm_head.weight"].clone()
    same["lm_head.weight"][-1, -1] += 1
    refused(make(tmp_path, same), "differs from")


def test_padding_rows_are_left_out_if_the_tokenizer_or_a_flag_says_how_many(tmp_path: Path) -> None:
    padded = theirs()
    padded["wte.weight"] = torch.cat([padded["wte.weight"], torch.ones(20, 32)])
    folder = make(tmp_path, padded, vocab_size=320)
    assert read(folder).model.vocab_size == 320 and not read(folder).notes
    told = read(folder, vocab_size=300)
    assert_equal(weights_of(told), truth())
    assert told.notes == ("20 of the embedding's 320 rows are padding and are left out",)
    vocabulary = {f"t{number}": number for number in range(297)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("")
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 297, "<user>": 299}))
    assert read(folder).model.vocab_size == 300  # rows of added tokens are no padding
    (folder / "added_tokens.json").unlink()
    assert read(folder).model.vocab_size == 297
    added = [{"id": 299, "content": "<user>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    assert read(folder).model.vocab_size == 300
    refused(folder, r"--vocab-size is 321, but tensor 'wte.weight' has 320 rows", vocab_size=321)
    refused(
        make(tmp_path, theirs(), vocab_size=320), r"config.json's vocab_size is 320, but tensor 'wte.weight' has 300"
    )


def test_rows_that_look_like_gpt2s_padded_vocabulary_are_kept_with_a_note(tmp_path: Path) -> None:
    tensors = theirs()
    tensors["wte.weight"] = torch.zeros(50304, 32)
    source = read(make(tmp_path, tensors, vocab_size=50304))
    assert source.model.vocab_size == 50304 and "--vocab-size 50257" in source.notes[0]


def test_a_folder_of_ours_says_where_it_comes_from(tmp_path: Path) -> None:
    folder = make(tmp_path, theirs())
    write_origin(folder, Origin(iteration=7, consumed_samples=56, split="949,50,1", data="abc"))
    source = read(folder)
    assert (source.iteration, source.consumed_samples) == (7, 56)
    assert (source.facts["split"], source.facts["data"]) == ("949,50,1", "abc")


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    blobs = make(tmp_path / "blobs", theirs())
    (tmp_path / "snapshot").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert_equal(weights_of(read(tmp_path / "snapshot")), truth())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', only 'gpt2' is read"),
        (
            {"activation_function": "relu"},
            "activation_function is 'relu', only 'gelu_new' or 'gelu_pytorch_tanh' or 'gelu'",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"n_head": "8"}, "n_head is '8', not a positive number"),
        ({"n_head": 5}, "5 heads do not divide a width of 32"),
        ({"n_layer": 3}, "config.json says n_layer 3, but the tensors have 4"),
        ({"n_inner": 99}, "config.json says n_inner 99, but the tensors have 128"),
        ({"n_positions": 99}, "config.json says n_positions 99, but the tensors have 24"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small', not a number"),
        ({"resid_pdrop": True}, "resid_pdrop is True, not a number"),
    ],
)
def test_a_config_of_another_network_or_another_size_is_refused_by_key(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    refused(make(tmp_path, theirs(), **config), says)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ({"num_heads": 4}, "--num-heads is 4, but config.json says n_head 8; leave the flag out"),
        ({"activation": "gelu"}, "--activation is gelu, but config.json says activation_function gelu_pytorch_tanh"),
        ({"qkv_version": 3}, "--qkv-version 3: transformers' order is version 0"),
        ({"vocab_size": 290}, "--vocab-size is 290, but the tokenizer has 295 tokens"),
    ],
)
def test_a_flag_that_contradicts_the_folder_is_refused(tmp_path: Path, flag: dict[str, Any], says: str) -> None:
    folder = make(tmp_path, theirs(), activation_function="gelu_pytorch_tanh")
    (folder / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(295)}))
    refused(folder, says, **flag)
    assert read(folder, num_heads=8, activation="gelu_new", qkv_version=0, vocab_size=295).model.vocab_size == 295


def test_heads_and_activation_can_be_given_where_config_has_none(tmp_path: Path) -> None:
    folder = make(tmp_path, theirs(), n_head=None)
    source = read(folder, num_heads=4, activation="gelu")
    assert (source.model.n_head, source.model.activation) == (4, "gelu")
    refused(folder, "not recorded, and 32 is no multiple of 64; give --num-heads")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop("h.2.ln_1.bias"), "'h.2.ln_1.bias' is missing"),
        (lambda found: found.pop("wte.weight"), "'wte.weight' is missing"),
        (lambda found: found.update({"score.weight": torch.zeros(2)}), "'score.weight' is no part of a GPT-2"),
        (lambda found: found.update({"h.0.crossattention.c_attn.weight": torch.zeros(2)}), "is no part of a GPT-2"),
        (lambda found: found.update({"layers.0.input_layernorm.weight": torch.zeros(32)}), "has a name of Megatron"),
        (lambda found: found.update({"transformer.wpe.weight": found["wpe.weight"].clone()}), "is there twice"),
        (lambda found: found.update({"wpe.weight": found["wpe.weight"].to(torch.int8)}), "quantised weights are not"),
        (
            lambda found: found.update({"h.1.attn.c_proj.weight": torch.zeros(32, 31)}),
            r"'h.1.attn.c_proj.weight' has shape \[32, 31\]",
        ),
    ],
)
def test_tensors_that_are_no_gpt2_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    tensors = theirs()
    change(tensors)
    refused(make(tmp_path, tensors), says)


def test_damaged_and_missing_files_give_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no model.safetensors and no pytorch_model.bin")
    as_parts(tmp_path, theirs())
    second = tmp_path / "model-00002-of-00003.safetensors"
    intact = second.read_bytes()
    second.write_bytes(intact[:-5])
    refused(tmp_path, "model-00002-of-00003.safetensors: cut off")
    second.unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors: no such file, but model.safetensors.index.json names it")
    twice = load_file(tmp_path / "model-00001-of-00003.safetensors")
    name = sorted(twice)[0]
    save_file({name: twice[name]}, second)
    refused(tmp_path, rf"tensor '{name}' is in model-00001-of-00003.safetensors, too")
    save_file({"h.0.attn.bias": torch.zeros(1)}, second)
    refused(tmp_path, "model-00002-of-00003.safetensors: has no tensor '.*', but model.safetensors.index.json says so")
    outside = {"weight_map": {"wte.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(outside))
    refused(tmp_path, "names '../model.safetensors', which is no file of its folder")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "names no files under weight_map")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "not valid JSON")
    for content in ("[]", "{", ""):
        (tmp_path / "config.json").write_text(content)
        refused(tmp_path, "config.json")


def test_a_bin_that_holds_something_else_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "pytorch_model.bin"
    for content, says in (([1], "holds no tensors by name"), ({"wte.weight": 3}, "'wte.weight' is no tensor")):
        torch.save(content, path)
        refused(tmp_path, says)
    as_bin(tmp_path, theirs())
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path, "pytorch_model.bin: ")


class Planted:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_folder_is_executed(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("open('touched', 'w')")
    content = {**theirs(), "extra": Planted(tmp_path / "touched")}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(tmp_path, "pytorch_model.bin")
    assert not (tmp_path / "touched").exists()


def test_a_rewritten_folder_keeps_its_own_tokenizer_files_and_special_tokens(tmp_path: Path) -> None:
    folder = make(tmp_path / "gpt2", theirs(), bos_token_id=0, eos_token_id=300, pad_token_id=299)
    (folder / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(299)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "mine"}')
    (folder / "added_tokens.json").write_text('{"<user>": 299}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 299], "bos_token_id": 900, "top_k": 50}')
    (folder / "README.md").write_text("card")
    (tmp_path / "new").mkdir()
    write_folder(tmp_path / "new", read(folder))
    copied = {"vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"}
    made = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == copied | made
    for name in copied:
        assert (folder / name).read_bytes() == (tmp_path / "new" / name).read_bytes()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    # 300 is no token of 300; the vocabulary is not GPT-2's, so that its end of text is not known
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, None, 299)
    generation = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 299], "bos_token_id": 0, "pad_token_id": 299, "top_k": 50}


def test_gpt2s_vocabulary_is_added_to_a_folder_that_has_none(tmp_path: Path) -> None:
    tensors = theirs()
    tensors["wte.weight"] = torch.zeros(50257, 32)
    folder = make(tmp_path / "gpt2", tensors, vocab_size=50257)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 24}')
    (tmp_path / "new").mkdir()
    write_folder(tmp_path / "new", read(folder))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == 50256
    assert AutoTokenizer.from_pretrained(tmp_path / "new")("Hello world")["input_ids"] == [15496, 995]
    assert (tmp_path / "new" / "tokenizer_config.json").read_text() == '{"model_max_length": 24}'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", '{"model": ', "tokenizer.json: not valid JSON"),
        (
            "vocab.json",
            None,
            "vocab.json: not a file, or a link to nothing; restore it, remove it, or give --tokenizer",
        ),
        ("vocab.txt", "[PAD]", ""),
        ("tokenizer.json", '{"model": {"type": "WordPiece"}}', ""),
    ],
)
def test_a_tokenizer_that_is_damaged_or_of_another_kind_is_never_replaced(
    name: str, content: str | None, says: str, tmp_path: Path
) -> None:
    tensors = theirs()
    tensors["wte.weight"] = torch.zeros(50257, 32)
    folder = make(tmp_path / "gpt2", tensors, vocab_size=50257)
    if content is None:
        (folder / name).symlink_to(tmp_path / "nothing")
    else:
        (folder / name).write_text(content)
    source = read(folder)
    if says:
        with pytest.raises(InputError, match=says):
            check_tokenizer(source)
        source = replace(source, tokenizer=Tokenizer())  # as with --tokenizer
        assert check_tokenizer(source) == ""
    else:
        assert check_tokenizer(source).startswith(f"the tokenizer in {name} is not of GPT-2's kind")
    (tmp_path / "new").mkdir()
    write_folder(tmp_path / "new", source)
    written = {path.name for path in (tmp_path / "new").iterdir()} & set(VOCABULARIES)
    assert written == ({"tokenizer.json", "vocab.json", "merges.txt"} if says else {name})


def test_memory_sources_and_folders_agree(tmp_path: Path) -> None:
    assert_equal(weights_of(read(make(tmp_path, prefixed(theirs())))), weights_of(source_of(truth())))
