"""Load a GPT-2 from a Hugging Face folder. `convert.targets.huggingface` writes such folders.

Their layout differs from ours twice: linear layers are Conv1D, stored [in, out]; and the qkv
columns are ordered [(q, k, v), head, dim], our rows [head, (q, k, v), dim].
"""

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from training.checkpoint.files import StoredTensor, read_file
from training.huggingface.config import OLD_WEIGHTS, Variant, find_weights, read_config, read_variant
from training.huggingface.origin import check_hash
from training.huggingface.tokenizer import grown_rows
from training.model import initial_value
from training.parallel.dtensor import copy_shard_
from training.tensors import HEAD, HUGGING_FACE_PREFIX, QKV, Sizes, all_names, leaf_of

Readable = Tensor | StoredTensor
Stored = TypeVar("Stored")
_IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files


def convert_tensors(
    tensors: Mapping[str, Readable],
    model: ModelSettings,
    wanted: Container[str] | None = None,
    variant: Variant | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors with our names and layout, one at a time.

    `wanted` holds our names of the tensors to yield; None yields all. `variant` None is our own
    model. Raises CheckpointError before the first tensor if one is missing, unknown or of another
    shape, or a tied head differs from the embedding.
    """
    variant = variant or Variant(4 * model.n_embd)
    expected = set(all_names(model.n_layer, variant.tied))
    theirs = {name.removeprefix(HUGGING_FACE_PREFIX): t for name, t in tensors.items() if not name.endswith(_IGNORED)}
    head = theirs.pop(HEAD, None) if variant.tied else None
    if head is not None and "wte.weight" not in theirs:  # safetensors' save_model keeps one name of a shared tensor
        theirs["wte.weight"] = head
    for name in sorted(expected ^ theirs.keys()):
        raise CheckpointError(f"tensor {name!r} is {'missing' if name in expected else 'no part of a GPT-2'}")
    sizes = Sizes(model.n_embd, variant.n_inner, model.seq_len, model.vocab_size)
    for name, tensor in theirs.items():
        shape = leaf_of(name).shape(sizes, conv1d=True)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    if head is not None and not torch.equal(_read(head).float(), _read(theirs["wte.weight"]).float()):
        raise CheckpointError("tensor 'lm_head.weight' differs from wte, but the head is tied (tie_word_embeddings)")
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

    `others`: see `find_weights`. Raises CheckpointError for a tensor that is in two files or not in
    the file that the index names.
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


def read_tensors(folder: Path, *others: str) -> dict[str, Readable]:
    """The tensors in a folder's weight files, with Hugging Face's names and layout, not read yet.

    `others`: see `find_weights`. Raises CheckpointError for a file that is damaged or differs from
    its hash in a training.json of ours.
    """

    def read(file: Path) -> Mapping[str, Readable]:
        check_hash(file)
        return read_file(file) if file.suffix == ".safetensors" else _read_old_file(file)

    return open_weights(folder, read, *others)[1]


def _read_old_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin; since torch 1.6 memory-mapped, with a checked CRC32."""
    try:
        if zipped := is_zipfile(file):
            with ZipFile(file) as archive:
                if bad := archive.testzip():
                    raise ValueError(f"{bad} differs from its CRC32")
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        if not (isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())):
            raise TypeError("not one tensor by each name")
    except Exception as error:  # whatever a damaged pickle or archive leads to
        problem = str(error).partition("\n")[0][:150]
        raise CheckpointError(f"{file}: damaged, or no file of tensors ({problem}); copy or save it again") from None
    return content


def load_pretrained(folder: Path) -> tuple[ModelSettings, Variant, dict[str, Tensor]]:
    """Architecture and weights, in our layout, of any GPT-2 in safetensors or pytorch_model.bin."""
    model, variant = read_variant(folder)
    tensors = read_tensors(folder, OLD_WEIGHTS)
    try:
        return model, variant, dict(convert_tensors(tensors, model, variant=variant))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def load_finetune(
    parameters: Mapping[str, nn.Parameter], model: ModelSettings, folder: Path, ours: Tokenizer, seed: int
) -> int:
    """Fill this rank's parameters, one tensor at a time; returns the number of new tokens.

    `check_finetune` has accepted the folder. New tokens, which only the run's tokenizer `ours` has,
    get the initial values of `seed`. Raises CheckpointError on all ranks if the tensors are not a
    GPT-2's.
    """
    tensors = read_tensors(folder)
    rows = torch.tensor(grown_rows(folder, ours, model.vocab_size) or [])
    try:
        for tensor, whole in convert_tensors(tensors, read_config(folder), parameters):
            if tensor == "wte.weight" and len(rows):
                new = initial_value(tensor, torch.Size((len(rows), model.n_embd)), model, seed)
                whole = torch.where(rows[:, None] < 0, new, whole[rows.clamp(min=0)])
            used = {"wte.weight": model.vocab_size, "wpe.weight": model.seq_len}.get(tensor)
            copy_shard_(parameters[tensor], whole[:used])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return int((rows < 0).sum())
