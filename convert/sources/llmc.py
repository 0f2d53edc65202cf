"""Read llm.c's model_*.bin: a header, then every tensor of all layers, matrices [out, in].

    bytes  content
    1024   256 int32: 20240326; version; positions; true vocabulary; layers; heads; width C;
           padded vocabulary; zeros
    rest   wte [padded, C]; wpe [positions, C]; for all layers together ln_1's weights, ln_1's
           biases, and so on for c_attn, c_proj, ln_2, c_fc, c_proj; ln_f

Version 3 is float32, version 5 bfloat16; all is little-endian. A run has a file per save, such as
model_00019560.bin, and the optimizer's state in others.
Source: train_gpt2.py and train_gpt2.cu of https://github.com/karpathy/llm.c
"""

import math
import re
from pathlib import Path

import numpy as np
import torch

from common.errors import CheckpointError
from convert.arguments import Options
from convert.sources.huggingface import recorded_in
from convert.sources.ranks import architecture, qkv_order
from convert.sources.source import Source, whole
from training.checkpoint.files import StoredTensor
from training.huggingface.config import DROPOUTS
from training.tensors import LAYER_LEAVES, Sizes, leaf_of

_DTYPES = {3: torch.float32, 5: torch.bfloat16}  # by version
_ORDER = ("wte.weight", "wpe.weight", *LAYER_LEAVES, "ln_f.weight", "ln_f.bias")
_SAVE = re.compile(r"model_(\d+)\.bin")


def matches(path: Path) -> bool:
    """Whether `path` is a model of llm.c, or a folder with some."""
    return bool(_models(path))


def _models(path: Path) -> list[Path]:
    """The models at `path`, in order of their names."""
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _header(file)[0] == 20240326]


def _header(file: Path) -> list[int]:
    """The first 8 numbers; zeros if the file ends earlier."""
    return [*np.fromfile(file, "<i4", 8).tolist(), *[0] * 8][:8]


def open_folder(path: Path, options: Options) -> Source:
    """A file, or the newest save of a run. CheckpointError if cut off or of an unknown version."""
    files = _models(path)
    if len(files) > 1 and not all(_SAVE.fullmatch(file.name) for file in files):
        raise CheckpointError(f"{path}: holds {', '.join(file.name for file in files)}; give one of these files")
    file = files[-1]
    _, version, positions, tokens, layers, heads, width, rows = _header(file)
    if version not in _DTYPES:
        raise CheckpointError(f"{file}: version {version} of llm.c's format; 3 (float32) and 5 (bfloat16) are read")
    dtype, sizes, end = _DTYPES[version], Sizes(width, 4 * width, positions, rows), 1024
    stored: dict[str, StoredTensor] = {}
    for name in _ORDER:
        shape = (layers, *LAYER_LEAVES[name].shape(sizes)) if name in LAYER_LEAVES else leaf_of(name).shape(sizes)
        stored[name] = StoredTensor(file, end, dtype, shape)
        end += math.prod(shape) * dtype.itemsize
    if file.stat().st_size != end:
        raise CheckpointError(f"{file}: has {file.stat().st_size} bytes, not {end}: cut off or damaged; copy it again")
    tensors = {name: whole(tensor) for name, tensor in stored.items() if name not in LAYER_LEAVES}
    for layer in range(layers):
        tensors |= {f"h.{layer}.{name}": whole(stored[name][layer]) for name in LAYER_LEAVES}
    config = {"n_head": heads, "vocab_size": tokens, "activation_function": "gelu_new", **dict.fromkeys(DROPOUTS, 0.0)}
    model, notes = architecture(tensors, recorded_in(config, options, "the header"))
    return Source(
        path=file.parent,
        layout=f"llm.c, {file.name}, {layers} layers, {str(dtype).removeprefix('torch.')}",
        model=model,
        qkv=qkv_order(0, options, 1, what="llm.c's order"),
        tensors=tensors,
        files=(file,),
        iteration=int(save[1]) if (save := _SAVE.fullmatch(file.name)) else None,
        notes=notes,
    )
