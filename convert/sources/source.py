"""The common form of every source: GPT-2's tensors by name, each as blocks in files.

Names are Hugging Face's without `transformer.` (`wte.weight`, `h.0.mlp.c_fc.weight`, …, and `lm_head.weight` if the
head is not tied). Values stay as the source has them: padded vocabulary, the source's order of qkv rows, matrices
[out, in] unless `conv1d`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import CheckpointError
from common.tokenizer import Tokenizer
from training.checkpoint.files import Block, StoredTensor
from training.moments import ADAMW, moments_of
from training.tensors import Sizes, all_names, leaf_of

_ELEMENTS = 4 << 20  # per band of rows


@dataclass(frozen=True)
class Architecture:
    """The sizes and constants of a GPT-2, as in its config.json."""

    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int
    n_inner: int
    vocab_size: int
    """True tokens; the embedding may have more rows."""
    activation: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tied: bool = True
    """The head's weight is the token embedding."""
    dropout: float = 0.1

    @property
    def sizes(self) -> Sizes:
        """For the shapes in `training.tensors`, without padding."""
        return Sizes(self.n_embd, self.n_inner, self.n_positions, self.vocab_size)

    @property
    def parameters(self) -> int:
        """Their number, without padding."""
        return sum(math.prod(leaf_of(name).shape(self.sizes)) for name in all_names(self.n_layer, self.tied))


@dataclass(frozen=True)
class Recorded:
    """What a checkpoint or the flags state about its model; None, or absent, is unknown."""

    n_head: int | None = None
    vocab_size: int | None = None
    """True tokens."""
    tied: bool | None = None
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By field of `Architecture`, what must be that of the tensors: how it is called there, and its value."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `Architecture`."""
    consumed_samples: int | None = None
    notes: tuple[str, ...] = ()
    """What was assumed, a sentence each."""


@dataclass(frozen=True)
class QKV:
    """The order of the qkv rows in one shard, by Megatron's checkpoint_version; each head has `dim` rows of each.

    0: [(q, k, v), head, dim]   1: [head, dim, (q, k, v)]   2 and 3: [head, (q, k, v), dim]

    Equal orders compare equal: 3 is turned into 2, and the shards matter to version 0 alone.
    """

    version: int
    shards: int = 1
    """Tensor-parallel ranks, each with its share of the heads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", min(self.version, 2))
        object.__setattr__(self, "shards", 1 if self.version else self.shards)

    def split(self, rows: Tensor, n_head: int) -> Tensor:
        """[3 * C, …] in the source's order -> a view [(q, k, v), shard, head of the shard, dim, …]."""
        heads, rest = n_head // self.shards, rows.shape[1:]
        if self.version == 0:
            return rows.view(self.shards, 3, heads, -1, *rest).transpose(0, 1)
        if self.version == 1:
            return rows.view(self.shards, heads, -1, 3, *rest).movedim(3, 0)
        return rows.view(self.shards, heads, 3, -1, *rest).movedim(2, 0)

    def join(self, parts: Tensor) -> Tensor:
        """[(q, k, v), shard, head of the shard, dim, …] -> [3 * C, …] in this order; the inverse of `split`."""
        if self.version == 0:
            parts = parts.reshape(3, self.shards, -1, *parts.shape[3:])  # they may come from other shards
            return parts.transpose(0, 1).flatten(0, 3)
        return parts.movedim(0, 3 if self.version == 1 else 2).flatten(0, 3)


@dataclass(frozen=True)
class Sharded:
    """A whole tensor as the blocks that its holders have. Raises CheckpointError unless they tile it.

    It is read as one tensor, whatever dimensions the blocks cut.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    copies: Mapping[str, "Sharded"] = field(default_factory=dict, compare=False)
    """The same values elsewhere, by holder ("tensor rank 1", "pipeline stage 3"): compared, never used."""

    def __post_init__(self) -> None:
        regions = [block.region for block in self.blocks]
        covered = sum(region.size for region in regions)
        low, high = (
            np.array(ends).reshape(len(regions), len(self.shape))
            for ends in ([region.offset for region in regions], [region.end for region in regions])
        )
        # (block, block): whether they share an element, as a block that is not empty does with itself
        shared = (np.minimum(high[:, None], high) > np.maximum(low[:, None], low)).all(-1)
        if (high > self.shape).any() or covered != math.prod(self.shape) or shared.sum() > shared.trace():
            raise CheckpointError(f"its {len(self.blocks)} parts do not add up to shape {list(self.shape)}")

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds the values of all blocks."""
        return reduce(torch.promote_types, (block.tensor.dtype for block in self.blocks))

    def read(self) -> Tensor:
        """The whole tensor; memory for it and its largest block. Raises OSError naming a file that ends early."""
        if len(self.blocks) == 1:
            return self.blocks[0].tensor.read()
        whole = torch.empty(self.shape, dtype=self.dtype)
        for block in self.blocks:
            whole[block.region.slices] = block.tensor.read()
        return whole

    def bands(self, elements: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Offset and values of parts that tile the tensor: rows of one block, about `elements` elements at a time."""
        for (row, *others), stored in self.blocks:
            for band in row_bands(stored, elements):
                yield (row, *others), band
                row += len(band)

    def layers(self) -> list["Sharded"]:
        """The slices of a stacked tensor, one per index of dimension 0."""
        blocks: list[list[Block]] = [[] for _ in range(self.shape[0])]
        for (first, *offset), stored in self.blocks:
            for row in range(stored.shape[0]):
                blocks[first + row].append(Block(tuple(offset), stored[row]))
        return [Sharded(self.shape[1:], tuple(layer)) for layer in blocks]

    def moved(self, offset: Sequence[int]) -> tuple[Block, ...]:
        """The blocks in a larger tensor, in which this one begins at `offset`."""
        return tuple(Block(tuple(map(add, offset, block.offset)), block.tensor) for block in self.blocks)

    def view(self, shape: tuple[int, ...]) -> "Sharded":
        """A one-dimensional tensor in another shape. Raises CheckpointError if a block is not contiguous."""
        parts = (part for (start,), flat in self.blocks for part in _rectangles(flat, start, shape))
        return Sharded(shape, tuple(parts))

    def rows(self, first: int, last: int) -> "Sharded":
        """The rows from `first` to before `last` (of dimension 0), without copies."""
        kept = []
        for (start, *others), stored in self.blocks:
            low, high = max(first, start), min(last, start + stored.shape[0])
            if low < high:
                kept.append(Block((low - first, *others), stored.rows(low - start, high - start)))
        return Sharded((last - first, *self.shape[1:]), tuple(kept))


def whole(tensor: StoredTensor) -> Sharded:
    """A tensor that one holder has as a whole."""
    return Sharded(tuple(tensor.shape), (Block((0,) * len(tensor.shape), tensor),))


def end_to_end(flats: Iterable[StoredTensor]) -> Sharded:
    """One-dimensional tensors as one, in their order."""
    blocks, end = [], 0
    for flat in flats:
        blocks.append(Block((end,), flat))
        end += flat.shape[0]
    return Sharded((end,), tuple(blocks))


def _rectangles(flat: StoredTensor, start: int, shape: tuple[int, ...]) -> Iterator[Block]:
    """A range of the elements of a tensor of `shape`, from number `start` on, as rectangles: rows and parts of rows."""
    if flat.stride is not None:
        raise CheckpointError(f"{flat.path}: a flat part of a tensor is not contiguous")
    done, count = 0, flat.shape[0]
    while done < count:
        # the outermost dimension of which a whole slice begins at this element
        widths = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        axis = next(axis for axis, width in enumerate(widths) if (start + done) % width == 0 and count - done >= width)
        offset = tuple(map(int, np.unravel_index(start + done, shape)))
        slices = min((count - done) // widths[axis], shape[axis] - offset[axis])
        size = (*[1] * axis, slices, *shape[axis + 1 :])
        yield Block(offset, replace(flat.rows(done, done + math.prod(size)), shape=size))
        done += math.prod(size)


def row_bands(tensor: StoredTensor | Sharded, elements: int = _ELEMENTS) -> Iterator[Tensor]:
    """A tensor's rows, about `elements` elements at a time."""
    rows = max(1, elements // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, tensor.shape[0], rows):
        yield tensor.rows(start, min(start + rows, tensor.shape[0])).read()


def same_values(one: StoredTensor | Sharded, other: StoredTensor | Sharded) -> bool:
    """Whether two tensors are equal; they are read only if they are not the same bytes of a file."""
    if one == other:
        return True
    return tuple(one.shape) == tuple(other.shape) and all(map(torch.equal, row_bands(one), row_bands(other)))


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found and understood; no tensor has been read."""

    path: Path
    """The folder that holds the files: iter_0000100, a DeepSpeed tag, a Hugging Face folder."""
    layout: str
    """A description: "Megatron-LM, 24 layers, tensor 8 x pipeline 2, checkpoint_version 3"."""
    model: Architecture
    qkv: QKV
    tensors: Mapping[str, Sharded]
    files: tuple[Path, ...]
    """Every file that is read."""
    hashes: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)
    """`{"size": bytes, "xxh3": hex}` of files that were hashed when the source was opened."""
    conv1d: bool = False
    """Matrices of the layers are stored [in, out], qkv rows are columns."""
    iteration: int | None = None
    consumed_samples: int | None = None
    notes: tuple[str, ...] = ()
    """What was assumed or left out, a sentence each."""
    moments: Mapping[str, Mapping[str, Sharded]] = field(default_factory=dict)
    """By `training.moments`' names: tensors by the names of `tensors`, as many as the source names."""
    step: int | None = None
    """Optimiser steps that the moments have accumulated."""
    tokenizer: Tokenizer | None = None
    """None: the packaged GPT-2 vocabulary if the size is GPT-2's, else none."""
    tokenizer_files: tuple[Path, ...] = ()
    """A Hugging Face folder's own, of any kind, links to nothing among them: they are copied."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the report, JSON types: versions, arguments of the training."""

    def has_moments(self, optimizer: str) -> bool:
        """Whether every tensor has the moments that `optimizer` keeps of it, and their number of steps is known.

        To Muon, the second moment of a matrix that has the first one is not missing: it is `estimated`.
        """
        return self.step is not None and all(
            self._has(kind, name) or (optimizer == "muon" and name in self.estimated)
            for name in self.tensors
            for kind in moments_of(leaf_of(name), optimizer)
        )

    @property
    def estimated(self) -> tuple[str, ...]:
        """What AdamW updates here, but Muon where the source was trained: it has `exp_avg` without `exp_avg_sq`.

        These are the position embeddings of Megatron-core.
        """
        first, second = ADAMW
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if not leaf_of(name).conv1d and len(tensor.shape) == 2
            if self._has(first, name) and not self._has(second, name)
        )

    def _has(self, kind: str, name: str) -> bool:
        found = self.moments.get(kind, {})
        return name in found and found[name].shape == self.tensors[name].shape
