"""A merged folder gives the same greedy text in training.generate and in transformers."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, pipeline

from convert import merge_mp
from tests.training.helpers import run_main
from training import generate

PROMPT = "The list of"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_generate_and_the_pipeline_of_transformers_continue_alike(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, initializer_range=0.5))
    theirs.save_pretrained(tmp_path / "theirs")
    arguments = ("--checkpoint", tmp_path / "theirs", "--output", tmp_path / "merged", "--dtype", dtype)
    assert run_main(merge_mp.main, *arguments) == 0
    capsys.readouterr()
    ours = ("--checkpoint", tmp_path / "merged", "--prompt", PROMPT, "--max-tokens", "20", "--temperature", "0")
    assert run_main(generate.main, *ours) == 0
    text = capsys.readouterr().out
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    generator = pipeline("text-generation", model=model, tokenizer=GPT2Tokenizer.from_pretrained(tmp_path / "merged"))
    (found,) = generator(PROMPT, max_new_tokens=20, do_sample=False)
    assert re.sub(r"\s+", " ", found["generated_text"]).strip() in re.sub(r"\s+", " ", text)
    assert len(found["generated_text"]) > len(PROMPT) + 20
