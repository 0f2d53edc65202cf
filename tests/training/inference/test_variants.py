"""generate and evaluate use every GPT-2 that transformers knows, as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.errors import CheckpointError
from common.files import read_json
from common.tokenizer import Tokenizer
from tests.helpers import run_main
from tests.numerics import assert_close, logit_terms
from tests.training.helpers import Capsys
from tests.training.reference import random_gpt2
from training import evaluate, generate
from training.huggingface.config import read_config
from training.huggingface.tokenizer import write_tokenizer
from training.inference.load import load_model

TEXT = "The list of the towns"
SIZES = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
VARIANT = {"n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 0.03, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("constants", "weights"),
    [
        ({"reorder_and_upcast_attn": True, "mup_width_scale": 1.0}, "safetensors"),  # the same function
        ({}, "bin before torch 1.6"),
        ({"vocab_size": 50304, **VARIANT}, "bin"),
    ],
)
def test_a_variant_has_the_logits_greedy_text_and_loss_of_transformers(
    tmp_path: Path, capsys: Capsys, constants: dict[str, Any], weights: str
) -> None:
    theirs, tokenizer = random_gpt2(0.3, **SIZES, **constants), Tokenizer()
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, tokenizer, 24)
    if weights != "safetensors":
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
