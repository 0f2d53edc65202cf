"""Read nanoGPT's ckpt.pt: matrices [out, in] under names of transformers, beside the settings.

    {"model": {"transformer.wte.weight": …, "_orig_mod.transformer.h.0.…": …},
     "model_args": {"n_layer": 12, …}, "iter_num": 600000, "optimizer": …, "config": …}

With `bias` False in model_args, linear layers and norms have no biases; GPT-2 has, and zeros
compute the same. Source: train.py and model.py of https://github.com/karpathy/nanoGPT
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from convert.arguments import Options
from convert.megatron_args import json_args, number, real
from convert.pt import fields, load_pt
from convert.sources.huggingface import by_our_names, recorded_in
from convert.sources.ranks import architecture, qkv_order, tie_head
from convert.sources.source import Source, whole
from training.checkpoint.files import StoredTensor
from training.huggingface.config import DROPOUTS
from training.tensors import leaf_of

_FILE = "ckpt.pt"
_ZEROS = Path("/dev/zero")  # biases are read from here
_SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
_GELU = (
    "GELU is assumed to be the erf form, nanoGPT's since May 2023; GPT-2's is the tanh form "
    "(--activation gelu_new for an older training)"
)


def matches(folder: Path) -> bool:
    """Whether `folder` is an out_dir of nanoGPT."""
    return (folder / _FILE).is_file()


def open_folder(folder: Path, options: Options) -> Source:
    """The model in ckpt.pt. CheckpointError for anything that is not a whole GPT-2 of nanoGPT."""
    path = folder / _FILE
    content = fields(load_pt(path))
    args, stored = fields(content.get("model_args")), fields(content.get("model"))
    if not args or not all(isinstance(tensor, StoredTensor) for tensor in stored.values()):
        raise CheckpointError(f"{path}: holds no tensors under model, or no model_args; only nanoGPT's is read")
    for key, value in args.items():
        if key not in (*_SIZES, "vocab_size", "dropout", "bias") and value:
            raise CheckpointError(f"{path}: model_args has {key} {value!r}, a setting that nanoGPT's GPT-2 lacks")
    tensors, _ = tie_head(by_our_names(stored), True)
    if args.get("bias") is False:
        for name, weight in list(tensors.items()):
            if leaf_of(name).module.kind != "embedding":
                zeros = StoredTensor(_ZEROS, 0, torch.float32, weight.shape[:1])
                tensors.setdefault(f"{name.removesuffix('weight')}bias", whole(zeros))
    config: dict[str, Any] = {theirs: size for ours, theirs in _SIZES.items() if (size := number(args, ours))}
    config |= dict.fromkeys(DROPOUTS, real(args, 0.0, "dropout"))
    decided = replace(options, activation=options.activation or "gelu")
    model, notes = architecture(tensors, recorded_in(config, decided, "model_args"))
    return Source(
        path=folder,
        layout=f"nanoGPT, {model.n_layer} layers, {'without' if args.get('bias') is False else 'with'} biases",
        model=model,
        qkv=qkv_order(0, options, 1, what="nanoGPT's order"),
        tensors=tensors,
        files=(path,),
        iteration=number(content, "iter_num"),
        notes=notes if options.activation else (*notes, _GELU),
        facts={"model_args": json_args(args)},
    )
