"""Sources without files, and Hugging Face folders of our weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import CheckpointError
from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from convert.arguments import Options
from convert.assemble import HUGGING_FACE, assemble
from convert.sources.find import open_source
from convert.sources.source import QKV, Architecture, Sharded, Source, whole
from convert.targets.huggingface import write_folder
from tests.convert.encoded import SMALL
from training.checkpoint.files import Block
from training.tensors import leaf_of


@dataclass(frozen=True, eq=False)
class LoadedTensor:
    """A tensor in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor.contiguous()

    def rows(self, first: int, last: int) -> "LoadedTensor":
        return LoadedTensor(self.tensor[first:last])

    def __getitem__(self, row: int) -> "LoadedTensor":
        return LoadedTensor(self.tensor[row])


def source_of(weights: Mapping[str, Tensor], model: Architecture = SMALL, tensor: int = 1, **changes: Any) -> Source:
    """A source of weights in memory, in our layout (see `encoded.truth`), cut for `tensor` ranks.

    `changes` are other fields of the Source.
    """
    tensors = {name: _cut(name, weight, tensor) for name, weight in weights.items()}
    source = Source(Path("memory"), "weights in memory", model, QKV(3), tensors, files=())
    return replace(source, **changes)


def as_conv1d(weights: Mapping[str, Tensor], model: Architecture = SMALL, **changes: Any) -> Source:
    """A source of weights in Hugging Face's layout: [in, out], c_attn [(q, k, v), head, dim]."""
    turned: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".attn.c_attn." in name:
            weight = weight.view(model.n_head, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)
        turned[name] = weight.t() if weight.dim() == 2 and name.startswith("h.") else weight
    return source_of(turned, model, **{"qkv": HUGGING_FACE, "conv1d": True, **changes})


def in_blocks(tensor: Tensor, *counts: int) -> Sharded:
    """A tensor with each dimension cut into `counts` parts or less; the last block comes first."""
    cuts = [range(size)[:: -(-size // count)] for size, count in zip(tensor.shape, counts, strict=False)]
    blocks = []
    for offset in product(*cuts):
        part = tensor[tuple(slice(at, at + (cut.step)) for at, cut in zip(offset, cuts, strict=True))]
        blocks.append(Block((*offset, *[0] * (tensor.dim() - len(offset))), LoadedTensor(part)))
    return Sharded(tuple(tensor.shape), tuple(reversed(blocks)))


def in_other_blocks(source: Source) -> Source:
    """The source with all its tensors in parts: matrices in 3 x 2, vectors in 3."""
    return replace(source, tensors={name: in_blocks(one.read(), 3, 2) for name, one in source.tensors.items()})


def merged(source: Source, moment: str = "") -> dict[str, Tensor]:
    """All tensors of a source, or a moment of each, in our layout."""
    tensors = source.moments[moment] if moment else dict.fromkeys(source.tensors)
    return {name: assemble(source, name, tensor=tensor) for name, tensor in tensors.items()}


def refused(folder: Path, *parts: str, **options: Any) -> None:
    """Opening raises an error of one line that names the folder and has all `parts`."""
    with pytest.raises(CheckpointError) as caught:
        open_source(folder, Options(**options))
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message, message
    for part in parts:
        assert part in message, message


def exchange(one: Path, other: Path) -> None:
    """Each of two files or folders gets the name of the other."""
    aside = one.with_name("aside")
    for source, target in ((one, aside), (other, one), (aside, other)):
        source.rename(target)


def write_pretrained(
    folder: Path, weights: Mapping[str, Tensor], settings: ModelSettings, tokenizer: Tokenizer | None = None
) -> None:
    """Write one of our models, in our layout, as a Hugging Face folder, which is empty."""
    sizes = settings.model_dump(include={"n_layer", "n_head", "n_embd", "vocab_size", "dropout"})
    model = Architecture(n_positions=settings.seq_len, n_inner=4 * settings.n_embd, **sizes)
    write_folder(folder, source_of(weights, model, tokenizer=tokenizer))


def _cut(name: str, weight: Tensor, ranks: int) -> Sharded:
    dim = leaf_of(name).split
    if ranks == 1 or dim is None:
        copies = {f"tensor rank {rank}": whole(LoadedTensor(weight.clone())) for rank in range(1, ranks)}
        return replace(whole(LoadedTensor(weight)), copies=copies)
    parts = weight.tensor_split(ranks, dim)
    starts = [sum(part.shape[dim] for part in parts[:rank]) for rank in range(ranks)]
    offsets = [tuple(start if axis == dim else 0 for axis in range(weight.dim())) for start in starts]
    return Sharded(tuple(weight.shape), tuple(map(Block, offsets, map(LoadedTensor, parts))))
