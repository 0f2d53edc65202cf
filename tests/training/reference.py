"""Models with random weights to compare with, ours and transformers', with GPT-2's vocabulary."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from common.settings import ModelSettings
from common.vocabulary import vocabulary_files
from training.inference.load import model_from_weights
from training.model import GPT2, initial_value

SEQ_LEN = 24


def tiny_model(vocab_size: int) -> GPT2:
    """A model of ours with a context of 16 tokens."""
    settings = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=16, vocab_size=vocab_size, dropout=0.5)
    parameters = GPT2(settings).named_parameters()
    return model_from_weights(
        settings,
        {name: initial_value(name, p.shape, settings, 3) * (20 if p.dim() > 1 else 1) for name, p in parameters},
    )


def random_gpt2(spread: float = 0.1, **sizes: Any) -> GPT2LMHeadModel:
    """A model of transformers, far from its initial values."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, spread))
    return model


def write_reference(folder: Path, likely: str = "") -> tuple[GPT2LMHeadModel, GPT2Tokenizer]:
    """Save a small model and GPT-2's tokenizer; tokens of `likely` are likelier everywhere."""
    files = vocabulary_files()
    shutil.copyfile(files.encoder_json, folder / "vocab.json")
    shutil.copyfile(files.vocab_bpe, folder / "merges.txt")
    tokenizer = GPT2Tokenizer.from_pretrained(folder)
    model = random_gpt2(0.3, n_positions=SEQ_LEN, n_embd=16, n_layer=2, n_head=2)
    with torch.no_grad():
        for place, token in enumerate(tokenizer(likely)["input_ids"]):
            model.transformer.wte.weight[token] = 0
            model.transformer.wte.weight[token, place] = 4  # a direction of its own, towards which
            model.transformer.ln_f.bias[place] += 1  # every state leans
        if likely:
            model.transformer.wpe.weight *= 20  # which of them is likeliest is for the place to say
    model.save_pretrained(folder)
    return model, tokenizer
