"""Read a Hugging Face folder of any age: safetensors or pytorch_model.bin, any float type."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from common.vocabulary import token_count
from convert.arguments import Options
from convert.pt import load_pt, once
from convert.sources.names import parse
from convert.sources.ranks import architecture, qkv_order, tie_head
from convert.sources.source import Recorded, Sharded, Source, whole
from training.checkpoint.files import StoredTensor, read_file
from training.huggingface import origin
from training.huggingface.config import (
    ACTIVATIONS,
    CONFIG,
    DROPOUTS,
    GENERATION_CONFIG,
    INDEX,
    OLD_WEIGHTS,
    WEIGHTS,
    read_raw_config,
)
from training.huggingface.pretrained import open_weights
from training.huggingface.tokenizer import read_tokenizer
from training.tensors import HEAD

_WEIGHT_FILES = (WEIGHTS, INDEX, OLD_WEIGHTS, f"{OLD_WEIGHTS}.index.json")
_POINTER = "latest"  # DeepSpeed's
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FACTS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")


def matches(folder: Path) -> bool:
    """Whether it has a config.json, and weights, or else no DeepSpeed checkpoint of the Trainer."""
    has_weights = any((folder / name).is_file() for name in _WEIGHT_FILES)
    return (folder / CONFIG).is_file() and (has_weights or not (folder / _POINTER).is_file())


def open_folder(folder: Path, options: Options) -> Source:
    """The model in a folder. Raises CheckpointError for anything that is not a whole GPT-2."""
    config = read_raw_config(folder)
    files, stored = open_weights(folder, _read_file, OLD_WEIGHTS)
    weights = by_our_names(stored)
    tied = config.get("tie_word_embeddings", True)
    if tied and HEAD in weights and "wte.weight" not in weights:  # safetensors' save_model keeps one name of two
        weights["wte.weight"] = weights.pop(HEAD)
    tensors, _ = tie_head(weights, None)
    recorded = recorded_in(config, options)
    if tied or HEAD not in weights:  # an untied head may equal the embedding
        recorded.sizes["tied"] = f"{CONFIG}'s tie_word_embeddings", tied
    if tokens := token_count(folder):
        recorded = _with_tokens(recorded, tokens, options)
    model, notes = architecture(tensors, recorded, conv1d=True)
    rows = tensors["wte.weight"].shape[0]
    if model.vocab_size < rows:
        notes += (f"{rows - model.vocab_size} of the embedding's {rows} rows are padding and are left out",)
    if (folder / _POINTER).is_file():
        tag = (folder / _POINTER).read_text(errors="replace").strip()
        notes += (f"{files[-1].name} is used; for the DeepSpeed checkpoint give {folder / tag}",)
    types = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}))
    small = (CONFIG, GENERATION_CONFIG, origin.NAME, *origin.TOKENIZER_FILES)
    merged = origin.read_origin(folder) or origin.Origin()
    facts = {key: config.get(key) for key in _FACTS} | merged.facts
    return Source(
        path=folder,
        layout=f"Hugging Face, {model.n_layer} layers, {types}, {files[0].name if len(files) == 1 else files[-1].name}",
        model=model,
        qkv=qkv_order(0, options, 1, what="the order under names of transformers"),
        tensors=tensors,
        files=(*files, *(path for name in small if (path := folder / name).is_file())),
        conv1d=True,
        iteration=merged.iteration,
        consumed_samples=merged.consumed_samples,
        notes=notes,
        tokenizer=read_tokenizer(folder),
        tokenizer_files=tuple(path for name in origin.TOKENIZER_FILES if os.path.lexists(path := folder / name)),
        facts={key: value for key, value in facts.items() if value is not None},
    )


def _read_file(path: Path) -> Mapping[str, StoredTensor]:
    if path.suffix == ".safetensors":
        return read_file(path, once(origin.check_hash, path))
    content = load_pt(path)
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path}: holds no tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(f"{path}: {str(name)[:100]!r} is no tensor; a GPT-2's weights are nothing else")
    return content


def by_our_names(stored: Mapping[str, StoredTensor]) -> dict[str, Sharded]:
    """The weights by our names; causal masks of old files are left out."""
    tensors: dict[str, Sharded] = {}
    for key, tensor in stored.items():
        try:
            name = parse(key)
        except KeyError:
            raise CheckpointError(f"tensor {key!r} is no part of a GPT-2") from None
        if name is None:
            continue
        if name.family != "transformers":
            raise CheckpointError(f"tensor {key!r} has a name of Megatron; expected those of transformers")
        if name.ours() in tensors:
            raise CheckpointError(f"tensor {key!r} is there twice, with and without a prefix")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"tensor {key!r} is of {tensor.dtype}; quantised weights are not read")
        tensors[name.ours()] = whole(tensor)
    return tensors


def _with_tokens(recorded: Recorded, tokens: int, options: Options) -> Recorded:
    """With the tokenizer's vocabulary; CheckpointError if --vocab-size leaves tokens out."""
    if options.vocab_size is None:
        return replace(recorded, vocab_size=min(recorded.vocab_size or tokens, tokens))
    if options.vocab_size < tokens:
        raise CheckpointError(
            f"--vocab-size is {options.vocab_size}, but the tokenizer has {tokens} tokens; leave the flag out"
        )
    return recorded


def recorded_in(config: Mapping[str, Any], options: Options, place: str = CONFIG) -> Recorded:
    """The settings in a config.json and the flags; CheckpointError if they contradict."""
    for flag, key, given in (
        ("--num-heads", "n_head", options.num_heads),
        ("--activation", "activation_function", options.activation),
    ):
        said = "gelu_new" if config.get(key) == "gelu_pytorch_tanh" else config.get(key)
        if given is not None and said not in (None, given):
            raise CheckpointError(f"{flag} is {given}, but {place} says {key} {config[key]}; leave the flag out")
    sizes = {key: config.get(key) for key in ("n_layer", "n_embd", "n_positions")}
    sizes["n_inner"] = config.get("n_inner") or 4 * config.get("n_embd", 0)
    dropouts = [config.get(key, 0.1) for key in DROPOUTS]
    activation, notes = config.get("activation_function"), list[str]()
    if activation == "gelu":
        notes.append(f"GELU is the erf form, as {place} says; GPT-2's is the tanh form")
    if len(set(dropouts)) > 1:
        notes.append(f"of the dropout probabilities in {place}, {DROPOUTS[0]}'s {dropouts[0]} is kept for all")
    return Recorded(
        n_head=options.num_heads or config.get("n_head"),
        vocab_size=options.vocab_size or config.get("vocab_size"),
        sizes={key: (f"{place}'s {key}", size) for key, size in sizes.items() if size},
        constants={
            "activation": activation or options.activation or ACTIVATIONS[0],
            "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "dropout": dropouts[0],
        },
        notes=tuple(notes),
    )
