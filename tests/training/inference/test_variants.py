"""generate and evaluate use every GPT-2 that transformers knows, as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.errors import CheckpointError
from common.tokenizer import Tokenizer
from tests.helpers import run_main
from tests.training.helpers import Capsys
from tests.training.reference import random_gpt2
from training import evaluate, generate
from training.huggingface.config import read_config
from training.huggingface.tokenizer import write_tokenizer
from training.inference.load import load_model

TEXT = "The list of the towns"
SIZES = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
ALL: dict[str, Any] = {"n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 0.03}


@pytest.mark.parametrize(
    ("constants", "weights"),
    [
        ({"tie_word_embeddings": False}, "safetensors"),
        ({"activation_function": "gelu"}, "safetensors"),
        ({"n_inner": 40}, "safetensors"),
        ({"layer_norm_epsilon": 0.03}, "safetensors"),
        ({"reorder_and_upcast_attn": True, "mup_width_scale": 1.0}, "safetensors"),  # the same function
        ({}, "bin"),
        ({}, "old bin"),
        ({"tie_word_embeddings": False, "vocab_size": 50304, **ALL}, "bin"),
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
    tokens = torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(tokens).logits[..., :50257]
    found = load_model(tmp_path)[0](tokens).cpu()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    asked = ("--checkpoint", tmp_path, "--prompt", TEXT, "--max-tokens", 8, "--temperature", 0)
    assert run_main(generate.main, *asked) == 0
    prompt = torch.from_numpy(tokenizer.encode(TEXT).astype("int64"))[None]
    continued = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=8,
        do_sample=False,
        suppress_tokens=[*range(50257, theirs.config.vocab_size)] or None,
    )
    assert capsys.readouterr().out == tokenizer.decode(continued[0].tolist()) + "\n"
    (tmp_path / "text.txt").write_text(TEXT)
    asked = ("--checkpoint", tmp_path, "--data", tmp_path / "text.txt", "--output", tmp_path / "loss.json")
    assert run_main(evaluate.main, *asked) == 0
    ended = torch.cat([prompt[0], torch.tensor([tokenizer.end_of_text])])  # as every document
    with torch.no_grad():
        loss = cross_entropy(theirs(prompt).logits[0, :, :50257], ended[1:])
    assert json.loads((tmp_path / "loss.json").read_text())["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("key", [*ALL, "tie_word_embeddings"])
def test_a_variant_is_refused_as_the_start_of_a_training_by_its_key(tmp_path: Path, key: str) -> None:
    random_gpt2(**SIZES, **{key: ALL.get(key, False)}).config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=key):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mup_embeddings_scale", 10.0),
        ("mup_scale_qk_dot_by_d", True),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("attention_multiplier", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("use_parallel_residual", True),
        ("rope_theta", 10000.0),
    ],
)
def test_a_key_that_makes_another_function_of_the_same_tensors_is_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    model = random_gpt2(**SIZES)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=f"{path}: {key} is {value}"):
        load_model(tmp_path)


def test_a_bin_that_holds_code_or_no_tensors_is_one_line_and_nothing_is_run(tmp_path: Path) -> None:
    random_gpt2(**SIZES).config.save_pretrained(tmp_path)
    for content in ({"wte.weight": print}, {"wte.weight": 3}, [1]):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin: .*convert\.merge_mp"):
            load_model(tmp_path)
