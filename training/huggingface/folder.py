"""Hugging Face's GPT-2 folder: ours written as theirs, theirs (or anyone's) read as ours.

    DIR/config.json             architecture
        model.safetensors       float32, names under `transformer.`, no lm_head: it is tied to wte
        generation_config.json  where a text begins and ends
        tokenizer.json vocab.json merges.txt tokenizer_config.json     byte-level BPE, where the run has a tokenizer
        training.json           what the model was trained on, and the checksums of the files above

Two things differ from our layout. Their linear layers are Conv1D, stored [in, out]; and the columns of c_attn are
ordered [(q, k, v), head, dim] where our rows are [head, (q, k, v), dim].
"""

import shutil
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import CheckpointError
from common.files import write_json
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from training.huggingface.config import CONFIG, config_of, read_settings, weight_files
from training.huggingface.origin import Origin, write_origin
from training.huggingface.tokenizer import read_tokenizer, write_tokenizer
from training.model import GPT2

__all__ = [
    "each_tensor",
    "from_hugging_face",
    "read_folder",
    "read_tensors",
    "read_tokenizer",
    "to_hugging_face",
    "write_folder",
]

PREFIX = "transformer."
_LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks that old files carry


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


def each_tensor(
    tensors: Mapping[str, Tensor], model: ModelSettings, wanted: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Their tensors (with or without `transformer.`) under our names and in our layout, one at a time.

    `wanted` are the names, ours, to make; default: all. Before the first one, CheckpointError is raised when any tensor
    is missing, unknown or of another shape, or the head is not the tied one.
    """
    with torch.device("meta"):
        expected = {name: parameter.shape for name, parameter in GPT2(model).named_parameters()}
    theirs = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED)}
    head = theirs.pop("lm_head.weight", None)
    for name in sorted(expected.keys() ^ theirs.keys()):
        raise CheckpointError(f"tensor {name!r} is {'missing' if name in expected else 'no part of a GPT-2'}")
    for name in theirs:
        if name.endswith(_LINEAR):
            theirs[name] = theirs[name].t()  # [in, out] -> [out, in]
        if theirs[name].shape != expected[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(theirs[name].shape)}, config.json asks for {list(expected[name])}"
            )
    if head is not None and not torch.equal(head.float(), theirs["wte.weight"].float()):
        raise CheckpointError("tensor 'lm_head.weight' differs from wte: only tied heads are supported")
    for name, tensor in theirs.items():
        if wanted is None or name in wanted:
            if ".c_attn." in name:
                tensor = _swap_heads(tensor, 3, model.n_head)
            yield name, tensor.contiguous().float()


def from_hugging_face(tensors: Mapping[str, Tensor], model: ModelSettings) -> dict[str, Tensor]:
    """All of `each_tensor`."""
    return dict(each_tensor(tensors, model))


# ------------------------------------------------------------------------------------------------ folders


def write_folder(
    folder: Path,
    weights: dict[str, Tensor],
    model: ModelSettings,
    tokenizer: Tokenizer | None,
    origin: Origin | None = None,
) -> None:
    """Write the whole folder; the tokenizer's files go with it where there is one. `folder` exists and is empty.

    Every name that is written here stands in `training.huggingface.origin.FILES`.
    """
    end = tokenizer.end_of_text if tokenizer else None
    write_json(folder / CONFIG, config_of(model, end))
    write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    save_file(to_hugging_face(weights, model), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / "model.safetensors")  # safetensors makes it private
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, model.seq_len)
    write_origin(folder, origin)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder's files as they are, mapped: they take memory when they are read."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged ({error})") from None
    return tensors


def read_folder(folder: Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Architecture and weights, in our layout, of any GPT-2 saved with safetensors, in one file or several."""
    model, tensors = read_settings(folder), read_tensors(folder)
    try:
        return model, from_hugging_face(tensors, model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
