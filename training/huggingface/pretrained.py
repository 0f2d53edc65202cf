"""Load a GPT-2 from a Hugging Face folder. `convert.targets.huggingface` writes such folders.

Their layout differs from ours twice: linear layers are Conv1D, stored [in, out]; and the qkv columns are ordered
[(q, k, v), head, dim], our rows [head, (q, k, v), dim].
"""

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from common.settings import ModelSettings
from training.checkpoint.files import StoredTensor, read_file
from training.huggingface.config import find_weights, read_config
from training.huggingface.origin import check_hash
from training.parallel.dtensor import copy_shard_
from training.tensors import HEAD, HUGGING_FACE_PREFIX, QKV, Sizes, all_names, leaf_of

Readable = Tensor | StoredTensor
Stored = TypeVar("Stored")
_IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files


def convert_tensors(
    tensors: Mapping[str, Readable], model: ModelSettings, wanted: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors (with or without `transformer.`) with our names and layout, one at a time.

    `wanted` holds our names of the tensors to yield; None yields all. Raises CheckpointError before the first one if
    any tensor is missing, unknown or of another shape, or if the head is not tied.
    """
    expected = set(all_names(model.n_layer))
    theirs = {name.removeprefix(HUGGING_FACE_PREFIX): t for name, t in tensors.items() if not name.endswith(_IGNORED)}
    head = theirs.pop(HEAD, None)
    for name in sorted(expected ^ theirs.keys()):
        raise CheckpointError(f"tensor {name!r} is {'missing' if name in expected else 'no part of a GPT-2'}")
    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, model.vocab_size)
    for name, tensor in theirs.items():
        shape = leaf_of(name).shape(sizes, conv1d=True)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    if head is not None and not torch.equal(_read(head).float(), _read(theirs["wte.weight"]).float()):
        raise CheckpointError("tensor 'lm_head.weight' differs from wte: only tied heads are supported")
    for name, tensor in theirs.items():
        if wanted is None or name in wanted:
            leaf, value = leaf_of(name), _read(tensor)
            value = value.t() if leaf.conv1d else value  # [in, out] -> [out, in]
            if leaf.module.name == QKV:  # rows [(q, k, v), head, dim] -> [head, (q, k, v), dim]
                value = value.view(3, model.n_head, -1, *value.shape[1:]).transpose(0, 1).flatten(0, 2)
            yield name, value.contiguous().float()


def _read(tensor: Readable) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.read()


def open_weights(
    folder: Path, read: Callable[[Path], Mapping[str, Stored]], *others: str
) -> tuple[list[Path], dict[str, Stored]]:
    """A folder's weight files, its index last, and their tensors by the names in the files.

    `others`: see `find_weights`. Raises CheckpointError for a tensor that is in two files, or not where the index says.
    """
    path, listed = find_weights(folder, *others)
    files = sorted(set(listed.values())) or [path]
    tensors: dict[str, Stored] = {}
    holder: dict[str, Path] = {}
    for file in files:
        for name, tensor in read(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name!r} is in {holder[name].name}, too; remove one of them")
            tensors[name], holder[name] = tensor, file
    for name, file in listed.items():
        if holder.get(name) != file:
            raise CheckpointError(f"{file}: has no tensor {name!r}, but {path.name} says so; save the model again")
    return [*files, *([path] if listed else [])], tensors


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in a folder's safetensors files, with Hugging Face's names and layout; none has been read.

    Raises CheckpointError for a file that is damaged, or is not the one whose hash is in a training.json of ours.
    """

    def read(file: Path) -> dict[str, StoredTensor]:
        check_hash(file)
        return read_file(file)

    return open_weights(folder, read)[1]


def load_pretrained(folder: Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Architecture and weights, in our layout, of any GPT-2 saved as one or several safetensors files."""
    model, tensors = read_config(folder), read_tensors(folder)
    try:
        return model, dict(convert_tensors(tensors, model))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def load_finetune(parameters: Mapping[str, nn.Parameter], model: ModelSettings, folder: Path) -> None:
    """Fill this rank's parameters, in any layout, one tensor at a time.

    `check_finetune` has accepted the folder. Raises CheckpointError on all ranks if its tensors are not a GPT-2's.
    """
    tensors = read_tensors(folder)
    try:
        for tensor, whole in convert_tensors(tensors, read_config(folder), parameters):
            used = {"wte.weight": model.vocab_size, "wpe.weight": model.seq_len}.get(tensor)
            copy_shard_(parameters[tensor], whole[:used])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
