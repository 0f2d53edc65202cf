"""generate and evaluate use every GPT-2 that transformers knows, as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GPT2LMHeadModel

from common.errors import CheckpointError, ConfigError
from common.files import read_json, write_json
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from convert import merge_mp
from tests.common.test_vocabulary import FORMS
from tests.helpers import run_main
from tests.numerics import assert_close, logit_terms
from tests.training.helpers import Capsys
from tests.training.reference import random_gpt2
from training import evaluate, generate
from training.huggingface.config import check_finetune, read_config
from training.huggingface.origin import Origin, write_origin
from training.huggingface.tokenizer import read_tokenizer, write_tokenizer
from training.inference.load import load_model

TEXT = "The list of the towns"
SIZES = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
SETTINGS = {"seq_len": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
VARIANT = {"n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 0.03, "tie_word_embeddings": False}


def untied(theirs: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """The weights without the token embedding and its copy, the head."""
    return {name: value for name, value in theirs.state_dict().items() if "wte" not in name and "lm_head" not in name}


@pytest.mark.parametrize(
    ("constants", "weights"),
    [
        ({"reorder_and_upcast_attn": True, "mup_width_scale": 1.0}, "safetensors"),  # the same function
        ({}, "bin before torch 1.6"),
        ({}, "one name of a tied head"),  # as safetensors' save_model writes it; sizes by their other names
        ({"vocab_size": 50304, **VARIANT}, "bin"),
    ],
)
def test_a_variant_has_the_logits_greedy_text_and_loss_of_transformers(
    tmp_path: Path, capsys: Capsys, constants: dict[str, Any], weights: str
) -> None:
    theirs, tokenizer = random_gpt2(0.3, **SIZES, **constants), Tokenizer()
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, tokenizer, 24)
    if weights == "one name of a tied head":
        save_file({"lm_head.weight": theirs.lm_head.weight, **untied(theirs)}, tmp_path / "model.safetensors")
        config = read_json(tmp_path / "config.json")
        for ours, other in (
            ("n_embd", "hidden_size"),
            ("n_head", "num_attention_heads"),
            ("n_layer", "num_hidden_layers"),
        ):
            config[other] = config.pop(ours)
        write_json(tmp_path / "config.json", config)
    elif weights != "safetensors":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=weights == "bin")
    text = torch.tensor([*tokenizer.encode(TEXT).tolist(), tokenizer.end_of_text])
    with torch.no_grad():
        expected = theirs(text[None]).logits[0, :, :50257]
        continued = text[:-1]
        for _ in range(8):
            continued = torch.cat([continued, theirs(continued[None]).logits[0, -1:, :50257].argmax(-1)])
    found = load_model(tmp_path)[0](text[None])[0].cpu()
    assert_close(found, expected, terms=logit_terms(theirs.config))
    use = ("--checkpoint", tmp_path)
    assert run_main(generate.main, *use, "--prompt", TEXT, "--max-tokens", 8, "--temperature", 0) == 0
    assert capsys.readouterr().out == tokenizer.decode(continued.tolist()) + "\n"
    (tmp_path / "text.txt").write_text(TEXT)
    assert run_main(evaluate.main, *use, "--data", tmp_path / "text.txt", "--output", tmp_path / "loss.json") == 0
    loss = read_json(tmp_path / "loss.json")["loss"]
    assert loss == pytest.approx(float(cross_entropy(expected[:-1], text[1:])), rel=1e-5)


CHAT = "hello <usr> there<sep>"


@pytest.mark.parametrize(
    "form", ["5, special", "5, end of text first", "4, decoder", "4, added_tokens.json", "4, names"]
)
def test_a_model_with_added_tokens_has_the_greedy_text_and_loss_of_transformers(
    tmp_path: Path, capsys: Capsys, form: str
) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    FORMS[form](folder)
    tokens = AutoTokenizer.from_pretrained(folder)
    theirs = random_gpt2(0.3, **SIZES, vocab_size=len(tokens), eos_token_id=tokens.eos_token_id)
    theirs.save_pretrained(folder)
    assert run_main(merge_mp.main, "--checkpoint", folder, "--output", tmp_path / "merged") == 0
    text = torch.tensor([*tokens(CHAT)["input_ids"], tokens.convert_tokens_to_ids("<|endoftext|>")])
    (tmp_path / "text.txt").write_text(CHAT)
    capsys.readouterr()
    for path in (folder, tmp_path / "merged"):
        again, model = AutoTokenizer.from_pretrained(path), GPT2LMHeadModel.from_pretrained(path).eval()
        with torch.no_grad():
            loss = float(cross_entropy(model(text[None]).logits[0, :-1], text[1:]))
            found = model.generate(text[None, :-1], max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist()
        found = found[: found.index(int(text[-1]))] if int(text[-1]) in found else found
        use = ("--checkpoint", path)
        assert run_main(generate.main, *use, "--prompt", CHAT, "--max-tokens", 3, "--temperature", 0) == 0
        printed = capsys.readouterr()
        assert printed.out == CHAT + again.decode(found[len(text) - 1 :]) + "\n" and "padding" not in printed.err
        assert run_main(evaluate.main, *use, "--data", tmp_path / "text.txt", "--output", tmp_path / "loss.json") == 0
        assert read_json(tmp_path / "loss.json")["loss"] == pytest.approx(loss, rel=1e-5)
        capsys.readouterr()
    ours, chosen = ModelSettings(**SETTINGS, vocab_size=len(tokens)), read_tokenizer(folder)
    check_finetune(ours, "chat", folder, chosen)
    with pytest.raises(ConfigError, match=f"has {len(tokens)} tokens"):
        check_finetune(ours.model_copy(update={"vocab_size": len(tokens) - 1}), "chat", folder, chosen)


@pytest.mark.parametrize("masked", [True, False])
def test_a_model_that_never_saw_a_beginning_says_so_without_a_prompt(
    tmp_path: Path, capsys: Capsys, masked: bool
) -> None:
    random_gpt2(0.3, **SIZES).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, Tokenizer(), 24)
    write_origin(tmp_path, Origin(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=masked))
    for prompt in ("", "A"):
        assert run_main(generate.main, "--checkpoint", tmp_path, "--prompt", prompt, "--max-tokens", 1) == 0
        assert ("without a prompt" in capsys.readouterr().err) == (masked and not prompt)


@pytest.mark.parametrize("key", VARIANT)
def test_a_variant_is_refused_as_the_start_of_a_training_by_its_key(tmp_path: Path, key: str) -> None:
    random_gpt2(**SIZES, **{key: VARIANT[key]}).config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=key):
        read_config(tmp_path)


OTHERS = {"mup_embeddings_scale": 10.0, "mup_scale_qk_dot_by_d": True, "scale_attn_by_inverse_layer_idx": True}
OTHERS |= {"scale_attn_weights": False, "attention_multiplier": 0.5, "attn_logit_softcapping": 50.0}


@pytest.mark.parametrize("key", OTHERS)
def test_a_key_that_makes_another_function_of_the_same_tensors_is_refused_by_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **SIZES, key: OTHERS[key]}))
    with pytest.raises(CheckpointError, match=f"{path}: {key} is {OTHERS[key]}"):
        load_model(tmp_path)


def test_a_bin_that_holds_code_or_no_tensors_is_one_line(tmp_path: Path) -> None:
    random_gpt2(**SIZES).config.save_pretrained(tmp_path)
    for content in ({"wte.weight": print}, {"wte.weight": 3}, [1]):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin: [^\n]* no file of tensors[^\n]*$"):
            load_model(tmp_path)
