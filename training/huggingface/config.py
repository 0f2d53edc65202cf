"""Read and make the config.json of a Hugging Face GPT-2 folder. Imports no torch."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config import plain_words
from common.errors import CheckpointError, InputError
from common.files import read_json
from common.settings import ModelSettings

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The values, sizes aside, for which our model computes the same function; the first one is the default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


def make_config(
    *,
    n_layer: int,
    n_head: int,
    n_embd: int,
    n_positions: int,
    n_inner: int,
    vocab_size: int,
    activation: str = "gelu_new",
    layer_norm_epsilon: float = 1e-5,
    tied: bool = True,
    dropout: float = 0.1,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The content of config.json, complete enough for transformers, vLLM and llama.cpp's converter.

    llama.cpp reads n_ctx, and transformers before 4.56 and older vLLM read torch_dtype. Add `bos_token_id` and
    `eos_token_id`: without them, transformers assumes 50256.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _FIXED.items()},
        "activation_function": activation,
        "layer_norm_epsilon": layer_norm_epsilon,
        "tie_word_embeddings": tied,
        "vocab_size": vocab_size,
        "n_positions": n_positions,
        "n_ctx": n_positions,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_inner": n_inner,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def is_pretrained_folder(path: Path) -> bool:
    """Whether `path` has the config.json of a Hugging Face folder."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> ModelSettings:
    """The architecture in a folder's config.json. Raises CheckpointError for a key that our GPT-2 does not support."""
    path = folder / CONFIG
    try:
        config = read_json(path)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a model's configuration")
    for key, allowed in _FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, only {' or '.join(map(repr, allowed))} is supported"
            )
    try:
        model = ModelSettings(
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            seq_len=config["n_positions"],
            vocab_size=config["vocab_size"],
            dropout=config.get("resid_pdrop", 0.1),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error} is missing") from None
    except ValidationError as errors:
        problem = errors.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{path}: {where}{': ' if where else ''}{plain_words(problem['msg'])}") from None
    if config.get("n_inner") not in (None, 4 * model.n_embd):
        raise CheckpointError(
            f"{path}: n_inner is {config['n_inner']}, only 4 x n_embd = {4 * model.n_embd} is supported"
        )
    return model


def weight_files(folder: Path) -> list[Path]:
    """A folder's model.safetensors, or the files in its index. Raises CheckpointError if one is missing."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise CheckpointError(f"{folder}: no {WEIGHTS}; save the model with safetensors first")
    return sorted(set(read_index(index).values()))


def read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor. Raises CheckpointError if a file is missing."""
    try:
        parts = read_json(index)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    parts = parts.get("weight_map") if isinstance(parts, dict) else None
    if not isinstance(parts, dict) or not parts or not all(isinstance(name, str) for name in parts.values()):
        raise CheckpointError(f"{index}: names no files under weight_map; save the model again")
    for name in sorted(set(parts.values())):
        if name != Path(name).name:
            raise CheckpointError(f"{index}: names {name!r}, which is no file of its folder")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent / name}: no such file, but {index.name} names it")
    return {tensor: index.parent / name for tensor, name in parts.items()}
