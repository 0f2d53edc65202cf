"""Sources without files, and Hugging Face folders of our weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from common.settings import ModelSettings
from common.tokenizer import Tokenizer
from convert.files.stored import LoadedTensor
from convert.sources.ranks import split_dim
from convert.sources.source import QKV, Architecture, Block, Sharded, Source, whole
from convert.targets.huggingface import write_folder
from tests.convert.encoded import SMALL


def source_of(weights: Mapping[str, Tensor], model: Architecture = SMALL, tensor: int = 1, **changes: Any) -> Source:
    """A source of weights in memory, in our layout (see `encoded.truth`), cut for `tensor` ranks.

    `changes` are other fields of the Source.
    """
    tensors = {name: _cut(name, weight, tensor) for name, weight in weights.items()}
    source = Source(Path("memory"), "weights in memory", model, QKV(3), tensors, files=())
    return replace(source, **changes)


def write_pretrained(
    folder: Path, weights: Mapping[str, Tensor], settings: ModelSettings, tokenizer: Tokenizer | None = None
) -> None:
    """Write one of our models, in our layout, as a Hugging Face folder, which exists and is empty."""
    model = Architecture(
        n_layer=settings.n_layer,
        n_head=settings.n_head,
        n_embd=settings.n_embd,
        n_positions=settings.seq_len,
        n_inner=4 * settings.n_embd,
        vocab_size=settings.vocab_size,
        dropout=settings.dropout,
    )
    write_folder(folder, source_of(weights, model, tokenizer=tokenizer))


def _cut(name: str, weight: Tensor, ranks: int) -> Sharded:
    dim = split_dim(name, conv1d=False)
    if ranks == 1 or dim is None:
        copies = {f"tensor rank {rank}": whole(LoadedTensor(weight.clone())) for rank in range(1, ranks)}
        return Sharded(tuple(weight.shape), whole(LoadedTensor(weight)).blocks, copies)
    parts = weight.tensor_split(ranks, dim)
    starts = [sum(part.shape[dim] for part in parts[:rank]) for rank in range(ranks)]
    offsets = [tuple(start if axis == dim else 0 for axis in range(weight.dim())) for start in starts]
    return Sharded(tuple(weight.shape), tuple(map(Block, offsets, map(LoadedTensor, parts))))
