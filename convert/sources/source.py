"""The common form of every source: GPT-2's tensors by name, each as blocks in files.

Names are those of `training.tensors`. Values stay as the source has them: padded vocabulary, its
order of qkv rows, matrices [out, in] unless `conv1d`.
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
    """The sizes and constants of a GPT-2, as in config.json."""

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
        """The sizes for `training.tensors`, without padding."""
        return Sizes(self.n_embd, self.n_inner, self.n_positions, self.vocab_size)

    @property
    def parameters(self) -> int:
        """Number of parameters without padding."""
        return sum(math.prod(leaf_of(name).shape(self.sizes)) for name in all_names(self.n_layer, self.tied))


@dataclass(frozen=True)
class Recorded:
    """What a checkpoint or the flags state about the model; None or absent if unknown."""

    n_head: int | None = None
    vocab_size: int | None = None
    """True tokens."""
    tied: bool | None = None
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Sizes that the tensors must have, by field of `Architecture`: recorded name and value."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `Architecture`."""
    consumed_samples: int | None = None
    notes: tuple[str, ...] = ()
    """What was assumed, one sentence each."""


@dataclass(frozen=True)
class QKV:
    """The order of the qkv rows in one shard, by Megatron's checkpoint_version.

    0: [(q, k, v), head, dim]   1: [head, dim, (q, k, v)]   2 and 3: [head, (q, k, v), dim]

    Equal orders compare equal: 3 becomes 2, and only version 0 depends on the shards.
    """

    version: int
    shards: int = 1
    """Tensor-parallel ranks, each with its share of the heads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", min(self.version, 2))
        object.__setattr__(self, "shards", 1 if self.version else self.shards)

    def split(self, rows: Tensor, n_head: int) -> Tensor:
        """[3 * C, …] in this order -> a view [(q, k, v), shard, head of the shard, dim, …]."""
        heads, rest = n_head // self.shards, rows.shape[1:]
        if self.version == 0:
            return rows.view(self.shards, 3, heads, -1, *rest).transpose(0, 1)
        if self.version == 1:
            return rows.view(self.shards, heads, -1, 3, *rest).movedim(3, 0)
        return rows.view(self.shards, heads, 3, -1, *rest).movedim(2, 0)

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of `split`."""
        if self.version == 0:
            parts = parts.reshape(3, self.shards, -1, *parts.shape[3:])  # another order may have other shards
            return parts.transpose(0, 1).flatten(0, 3)
        return parts.movedim(0, 3 if self.version == 1 else 2).flatten(0, 3)


@dataclass(frozen=True)
class Sharded:
    """A tensor as blocks that cut any dimension. Raises CheckpointError unless they tile it."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    copies: Mapping[str, "Sharded"] = field(default_factory=dict, compare=False)
    """Copies by holder ("tensor rank 1", "pipeline stage 3"): compared, never used."""

    def __post_init__(self) -> None:
        regions = [block.region for block in self.blocks]
        covered = sum(region.size for region in regions)
        low = np.array([region.offset for region in regions]).reshape(len(regions), len(self.shape))
        high = np.array([region.end for region in regions]).reshape(low.shape)
        # (block, block): whether they overlap; a block that is not empty overlaps itself
        shared = (np.minimum(high[:, None], high) > np.maximum(low[:, None], low)).all(-1)
        if (high > self.shape).any() or covered != math.prod(self.shape) or shared.sum() > shared.trace():
            raise CheckpointError(f"its {len(self.blocks)} parts do not add up to shape {list(self.shape)}")

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds the values of all blocks."""
        return reduce(torch.promote_types, (block.tensor.dtype for block in self.blocks))

    def read(self) -> Tensor:
        """The whole tensor; takes memory for it and its largest block. Raises OSError."""
        if len(self.blocks) == 1:
            return self.blocks[0].tensor.read()
        whole = torch.empty(self.shape, dtype=self.dtype)
        for block in self.blocks:
            whole[block.region.slices] = block.tensor.read()
        return whole

    def bands(self, elements: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Offset and values of bands of rows that tile the tensor, about `elements` in each."""
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
        """The blocks of a larger tensor in which this one begins at `offset`."""
        return tuple(Block(tuple(map(add, offset, block.offset)), block.tensor) for block in self.blocks)

    def view(self, shape: tuple[int, ...]) -> "Sharded":
        """A flat tensor in another shape. Raises CheckpointError if a block is not contiguous."""
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
    """A tensor in one block."""
    return Sharded(tuple(tensor.shape), (Block((0,) * len(tensor.shape), tensor),))


def end_to_end(flats: Iterable[StoredTensor]) -> Sharded:
    """One-dimensional tensors as one, in their order."""
    blocks, end = [], 0
    for flat in flats:
        blocks.append(Block((end,), flat))
        end += flat.shape[0]
    return Sharded((end,), tuple(blocks))


def _rectangles(flat: StoredTensor, start: int, shape: tuple[int, ...]) -> Iterator[Block]:
    """Elements of a tensor of `shape` from number `start` on, as rows and parts of rows."""
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
    """Whether two tensors are equal; reads them unless they are the same bytes of a file."""
    if one == other:
        return True
    return tuple(one.shape) == tuple(other.shape) and all(map(torch.equal, row_bands(one), row_bands(other)))


@dataclass(frozen=True)
class Source:
    """An opened checkpoint; no tensor has been read."""

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
    """`{"size": bytes, "xxh3": hex}` of files that were hashed at opening."""
    conv1d: bool = False
    """Matrices of the layers are stored [in, out], qkv rows are columns."""
    iteration: int | None = None
    consumed_samples: int | None = None
    notes: tuple[str, ...] = ()
    """What was assumed or left out, one sentence each."""
    moments: Mapping[str, Mapping[str, Sharded]] = field(default_factory=dict)
    """Tensors by moment (of `training.moments`) and name; the source may lack some."""
    step: int | None = None
    """Optimiser steps that the moments have accumulated."""
    tokenizer: Tokenizer | None = None
    """None: the packaged GPT-2 vocabulary if the size is GPT-2's, else none."""
    tokenizer_files: tuple[Path, ...] = ()
    """Files of a Hugging Face folder, also broken links: they are copied."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the report, JSON types: versions, arguments of the training."""

    def has_moments(self, optimizer: str) -> bool:
        """Whether the number of steps is known and every tensor has the moments of `optimizer`.

        For Muon, second moments that are `estimated` count as present.
        """
        return self.step is not None and all(
            self._has(kind, name) or (optimizer == "muon" and name in self.estimated)
            for name in self.tensors
            for kind in moments_of(leaf_of(name), optimizer)
        )

    @property
    def estimated(self) -> tuple[str, ...]:
        """Tensors of AdamW here that the source trained with Muon: only `exp_avg` is stored.

        These are Megatron-core's position embeddings.
        """
        first, second = ADAMW
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if not leaf_of(name).conv1d and len(tensor.shape) == 2
            if self._has(first, name) and not self._has(second, name)
        )

    def _has(self, kind: str, name: str) -> bool:
        moment = self.moments.get(kind, {}).get(name)
        return moment is not None and moment.shape == self.tensors[name].shape
