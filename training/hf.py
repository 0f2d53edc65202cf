"""Hugging Face's GPT-2 folder: ours written as theirs, theirs (or anyone's) read as ours.

    DIR/config.json             architecture
        model.safetensors       float32, names under `transformer.`, no lm_head: it is tied to wte
        generation_config.json  where a text begins and ends
        vocab.json merges.txt tokenizer_config.json     GPT-2's byte-level BPE, where the model's vocabulary has it

Two things differ from our layout. Their linear layers are Conv1D, stored [in, out]; and the columns of c_attn are
ordered [(q, k, v), head, dim] where our rows are [head, (q, k, v), dim].
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import CheckpointError, InputError
from common.files import read_json, write_json
from common.settings import ModelSettings
from common.tokenizer import END_OF_TEXT, Tokenizer, VocabularyFiles
from training.model import GPT2

PREFIX = "transformer."
_LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks that old files carry

# What config.json must say, apart from sizes, for our model to be the same function.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


def _swap_heads(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Rows ordered [outer, inner, dim] become [inner, outer, dim]; shape unchanged."""
    return tensor.view(outer, inner, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def to_hugging_face(weights: dict[str, Tensor], model: ModelSettings) -> dict[str, Tensor]:
    """Our tensors under their names and in their layout, contiguous."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".c_attn." in name:
            tensor = _swap_heads(tensor, model.n_head, 3)
        if name.endswith(_LINEAR):
            tensor = tensor.t()  # [out, in] -> [in, out]
        theirs[PREFIX + name] = tensor.contiguous()
    return theirs


def from_hugging_face(tensors: dict[str, Tensor], model: ModelSettings) -> dict[str, Tensor]:
    """Their tensors (with or without `transformer.`) under our names and in our layout.

    Raises CheckpointError when a tensor is missing, unknown or of another shape, or the head is not the tied one.
    """
    with torch.device("meta"):
        expected = {name: parameter.shape for name, parameter in GPT2(model).named_parameters()}
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(PREFIX)
        if name.endswith(_IGNORED) or name == "lm_head.weight":
            continue
        if name.endswith(_LINEAR):
            tensor = tensor.t().contiguous()  # [in, out] -> [out, in]
        if ".c_attn." in name:
            tensor = _swap_heads(tensor, 3, model.n_head)
        ours[name] = tensor.contiguous().float()
    for name in sorted(expected.keys() | ours.keys()):
        if name not in ours or name not in expected:
            raise CheckpointError(f"tensor {name!r} is {'missing' if name in expected else 'no part of a GPT-2'}")
        if ours[name].shape != expected[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(ours[name].shape)}, config.json asks for {list(expected[name])}"
            )
    head = tensors.get("lm_head.weight")
    if head is not None and not torch.equal(head.float(), ours["wte.weight"]):
        raise CheckpointError("tensor 'lm_head.weight' differs from wte: only tied heads are supported")
    return ours


# ------------------------------------------------------------------------------------------------ folders


def write_folder(folder: Path, weights: dict[str, Tensor], model: ModelSettings, tokenizer: Tokenizer | None) -> None:
    """Write the whole folder; the tokenizer's files go with it where there is one. `folder` exists and is empty."""
    end = tokenizer.end_of_text if tokenizer else None
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _FIXED.items()},
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "n_ctx": model.seq_len,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": None,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), model.dropout),
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    save_file(to_hugging_face(weights, model), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it private
    if tokenizer is not None:
        shutil.copyfile(tokenizer.files.encoder_json, folder / "vocab.json")
        shutil.copyfile(tokenizer.files.vocab_bpe, folder / "merges.txt")
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "GPT2Tokenizer",
                "model_max_length": model.seq_len,
                "add_prefix_space": False,
                **special,
            },
        )


def is_folder(path: Path) -> bool:
    """Whether `path` looks like a Hugging Face model folder."""
    return (path / "config.json").is_file()


def read_settings(folder: Path) -> ModelSettings:
    """The architecture in config.json; CheckpointError names the key that our GPT-2 cannot follow."""
    path = folder / "config.json"
    try:
        config = read_json(path)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    for key, allowed in _FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, only {' or '.join(map(repr, allowed))} is supported"
            )
    try:
        width = config["n_embd"]
        if config.get("n_inner") not in (None, 4 * width):
            raise CheckpointError(f"{path}: n_inner is {config['n_inner']}, only 4 x n_embd = {4 * width} is supported")
        return ModelSettings(
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=width,
            seq_len=config["n_positions"],
            vocab_size=config["vocab_size"],
            dropout=config.get("resid_pdrop", 0.1),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error} is missing") from None


def read_folder(folder: Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Architecture and weights, in our layout, of any GPT-2 saved with safetensors, in one file or several."""
    model = read_settings(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no model.safetensors; save the model with safetensors first")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    try:
        return model, from_hugging_face(tensors, model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has no vocabulary files."""
    files = VocabularyFiles(folder / "vocab.json", folder / "merges.txt")
    return Tokenizer(files) if files.encoder_json.is_file() and files.vocab_bpe.is_file() else None
