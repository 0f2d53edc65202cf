"""A random GPT-2 with GPT-2's vocabulary, built and saved by transformers, to compare with."""

import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from common.tokenizer import vocabulary_files

SEQ_LEN = 24


class Reference(NamedTuple):
    """A folder, and the model and tokenizer that transformers saved there."""

    folder: Path
    model: GPT2LMHeadModel
    tokenizer: GPT2Tokenizer


def write_reference(folder: Path, likely: str = "") -> Reference:
    """Save a small model far from its initial values, and its tokenizer.

    The tokens of `likely` are likelier than others everywhere.
    """
    files = vocabulary_files()
    shutil.copyfile(files.encoder_json, folder / "vocab.json")
    shutil.copyfile(files.vocab_bpe, folder / "merges.txt")
    tokenizer = GPT2Tokenizer.from_pretrained(folder)
    config = GPT2Config(n_positions=SEQ_LEN, n_embd=16, n_layer=2, n_head=2)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.3))
        for place, token in enumerate(tokenizer(likely)["input_ids"]):
            model.transformer.wte.weight[token] = 0
            model.transformer.wte.weight[token, place] = 4  # a direction of its own, towards which
            model.transformer.ln_f.bias[place] += 1  # every state leans
        if likely:
            model.transformer.wpe.weight *= 20  # which of them is likeliest is for the place to say
    model.save_pretrained(folder)
    return Reference(folder, model, tokenizer)
