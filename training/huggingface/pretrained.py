"""Load a GPT-2 from a Hugging Face folder. `convert.targets.huggingface` writes such folders.

Their layout differs from ours twice: linear layers are Conv1D, stored [in, out]; and the columns of c_attn are ordered
[(q, k, v), head, dim], our rows [head, (q, k, v), dim].
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import CheckpointError
from common.settings import ModelSettings
from training.huggingface.config import read_config, weight_files
from training.huggingface.origin import check_hash
from training.model import GPT2

PREFIX = "transformer."
_LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files


def _swap_heads(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows from [outer, inner, dim] to [inner, outer, dim]; the shape stays."""
    return tensor.view(outer, inner, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def to_hugging_face(weights: dict[str, Tensor], model: ModelSettings) -> dict[str, Tensor]:
    """Our weights with Hugging Face's names and layout, contiguous."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".c_attn." in name:
            tensor = _swap_heads(tensor, model.n_head, 3)
        if name.endswith(_LINEAR):
            tensor = tensor.t()  # [out, in] -> [in, out]
        theirs[PREFIX + name] = tensor.contiguous()
    return theirs


def convert_tensors(
    tensors: Mapping[str, Tensor], model: ModelSettings, wanted: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors (with or without `transformer.`) with our names and layout, one at a time.

    `wanted` holds our names of the tensors to yield; None yields all. Raises CheckpointError before the first one if
    any tensor is missing, unknown or of another shape, or if the head is not tied.
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
    """Hugging Face's tensors with our names and layout; see `convert_tensors`."""
    return dict(convert_tensors(tensors, model))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder's safetensors files, memory-mapped, with Hugging Face's names and layout.

    Raises CheckpointError for a file that is damaged, or is not the one whose hash is in a training.json of ours.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        check_hash(file)
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged ({error})") from None
    return tensors


def load_pretrained(folder: Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Architecture and weights, in our layout, of any GPT-2 saved as one or several safetensors files."""
    model, tensors = read_config(folder), read_tensors(folder)
    try:
        return model, from_hugging_face(tensors, model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
