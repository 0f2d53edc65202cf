"""Read and make the config.json of a Hugging Face GPT-2 folder. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError, ConfigError, InputError
from common.files import read_json
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from common.vocabulary import token_count
from training.huggingface.tokenizer import grown_rows, true_vocabulary

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
OLD_WEIGHTS = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu")
"""The first two are the same function; the third is the exact one, with erf."""
# Only these values make the network a GPT-2; the first one is the default.
_GPT2: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ACTIVATIONS,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True, False),
    "quantization_config": (None,),
}
# Other names that transformers reads (its attribute_map).
_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
# Keys by which other networks change what the same tensors compute. GPT-2 lacks them or has None,
# False, 0 or 1.
_FOREIGN = re.compile(
    r"mup_.*|rope_.*|rotary.*|alibi.*|.*_multiplier|.*soft_?cap(ping)?|.*parallel_(attn|residual)|sliding_window"
    r"|(attn|attention|softmax|logits?|embeddings?|residual)_scal(e|ing)"
)
# Only these values give the function that our own model computes.
_OURS: dict[str, tuple[Any, ...]] = {
    "activation_function": ACTIVATIONS[:2],
    "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class Variant:
    """Settings of GPT-2 models that ours lack; such a model can be used, not trained."""

    n_inner: int
    """Width of the MLP; ours is 4 * n_embd."""
    exact_gelu: bool = False
    layer_norm_epsilon: float = 1e-5
    tied: bool = True


SIZES = ("n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size")
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def make_config(model: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json for transformers, vLLM and llama.cpp's converter.

    `model` has the fields of `convert.sources.source.Architecture`. llama.cpp reads n_ctx;
    transformers before 4.56 and older vLLM read torch_dtype. The caller adds `bos_token_id` and
    `eos_token_id`, because transformers assumes 50256 without them.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": model["activation"],
        "layer_norm_epsilon": model["layer_norm_epsilon"],
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": model["tied"],
        "add_cross_attention": False,
        "vocab_size": model["vocab_size"],
        "n_positions": model["n_positions"],
        "n_ctx": model["n_positions"],
        **{key: model[key] for key in ("n_embd", "n_layer", "n_head", "n_inner")},
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), model["dropout"]),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def is_pretrained_folder(path: Path) -> bool:
    """Whether `path` has the config.json of a Hugging Face folder."""
    return (path / CONFIG).is_file()


def read_raw_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises CheckpointError for a value that no GPT-2 has."""
    path = folder / CONFIG
    try:
        config = read_json(path)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a model's configuration")
    for other, key in _ALIASES.items():
        if other in config and config.setdefault(key, config[other]) != config[other]:
            raise CheckpointError(f"{path}: {other} is {config[other]!r}, but {key} is {config[key]!r}; remove one")
    _check(path, config, _GPT2)
    for key, value in config.items():
        if _FOREIGN.fullmatch(key) and (value is True or value not in (None, 0, 1)):
            raise CheckpointError(f"{path}: {key} is {value!r}, which makes the model no GPT-2")
    for key in SIZES:
        if config.get(key) is not None and (type(config[key]) is not int or config[key] < 1):
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, not a positive number")
    for key in ("layer_norm_epsilon", *DROPOUTS):
        if type(config.get(key, 0)) not in (int, float) or not 0 <= config.get(key, 0) < 1:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, not a number from 0 to 1")
    return config


def _check(path: Path, config: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    for key, allowed in values.items():
        if config.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, only {' or '.join(map(repr, allowed))} is supported"
            )


def read_config(folder: Path) -> ModelSettings:
    """The architecture in config.json. Raises CheckpointError if it cannot be trained here."""
    model, _ = read_variant(folder)
    _check(folder / CONFIG, read_raw_config(folder), {**_OURS, "n_inner": (4 * model.n_embd, None)})
    return model


def read_variant(folder: Path) -> tuple[ModelSettings, Variant]:
    """The architecture of any GPT-2. Raises CheckpointError for a missing key or wrong value."""
    path, config = folder / CONFIG, read_raw_config(folder)
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
        raise CheckpointError(f"{path}: {where}{': ' if where else ''}{problem['msg']}") from None
    return model, Variant(
        n_inner=config.get("n_inner") or 4 * model.n_embd,
        exact_gelu=config.get("activation_function") == "gelu",
        layer_norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )


def find_weights(folder: Path, *others: str) -> tuple[Path, dict[str, Path]]:
    """A folder's weight file; or its index, with the file of each tensor.

    `others` are older names of a weight file. Raises CheckpointError if there is none, or a file in
    the index is missing.
    """
    for name in (WEIGHTS, *others):
        if (folder / name).is_file():
            return folder / name, {}
        index = folder / f"{name}.index.json"
        if index.is_file():
            return index, _read_index(index)
    cure = "" if others else "; save the model with safetensors first"
    raise CheckpointError(f"{folder}: no {' and no '.join((WEIGHTS, *others))}, nor an index of its parts{cure}")


def _read_index(index: Path) -> dict[str, Path]:
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


def check_finetune(model: ModelSettings, name: str, folder: Path, ours: Tokenizer | None) -> None:
    """Raise ConfigError if the model `name` cannot start from `folder`.

    `ours` is the tokenizer of its run; None before it is trained. The sizes must be equal, except
    that seq_len and the vocabulary may be smaller, which leaves rows out. The vocabulary may also
    have all tokens of the folder's and more. Dropout is the run's own.
    """
    key = f"models.{name}.finetune"
    if not is_pretrained_folder(folder):
        raise ConfigError(
            f"{key}: {folder / CONFIG}: no such file; give a Hugging Face folder (python -m convert.merge_mp makes one)"
        )
    try:
        theirs = read_config(folder)
        path, parts = find_weights(folder)
        for file in sorted({*parts.values()}) or [path]:
            with safe_open(file, "numpy"):  # reads the header
                pass
    except SafetensorError as error:
        raise ConfigError(f"{key}: {file}: no safetensors file, or damaged ({error}); copy it again") from None
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from None
    for size in ("n_layer", "n_head", "n_embd", "seq_len"):
        wanted, stored = getattr(model, size), getattr(theirs, size)
        if wanted > stored if size == "seq_len" else wanted != stored:
            cure = " positions; that many or fewer can be trained" if size == "seq_len" else f"; set it to {stored}"
            raise ConfigError(f"models.{name}.model.{size} is {wanted}, but {folder / CONFIG} has {stored}{cure}")
    wanted, rows = model.vocab_size, theirs.vocab_size
    true = true_vocabulary(rows, folder)
    if true != wanted and (wanted < true if ours is None else grown_rows(folder, ours, wanted) is None):
        known = token_count(folder) is not None
        raise ConfigError(
            f"models.{name}.model.vocab_size is {wanted}, but {folder} has {true}"
            + (" tokens" if known else " embedding rows, and no tokenizer.json that says how many of them are padding")
            + f"; set it to {true} if the data were tokenized with that vocabulary, else tokenize them with it "
            "(tokenize.encoder_json, tokenize.vocab_bpe) or one with all of its tokens, or start from another folder"
        )
