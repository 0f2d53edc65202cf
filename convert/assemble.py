"""Assembles whole tensors of a source in a writer's layout, and prefetches the next ones."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from common.errors import CheckpointError
from common.workers import threaded_map
from convert.sources.consistency import check_distinct
from convert.sources.source import QKV, Sharded, Source
from training import tensors

Item = TypeVar("Item")
OURS = QKV(3)
"""The order of our own checkpoints: [head, (q, k, v), dim]."""
HUGGING_FACE = QKV(0)
"""[(q, k, v), head, dim]."""
_BAND = 1 << 19  # elements that are read and transposed at a time: they stay in the cache
_IN_FLIGHT = 5  # tensors: matrices and biases alternate, so at most three of them are matrices


def assemble(
    source: Source,
    name: str,
    *,
    qkv: QKV = OURS,
    conv1d: bool = False,
    dtype: torch.dtype | None = None,
    tensor: Sharded | None = None,
) -> Tensor:
    """The tensor `name`, contiguous, without vocabulary padding, qkv rows in the order `qkv`.

    Matrices are [out, in]; with `conv1d` those of layers are [in, out]. `tensor` is assembled
    instead of the weight, such as its moment. Bit-exact without `dtype`. Memory: the result and a
    few rows. Raises CheckpointError naming the files if two ranks have the same part of a matrix.
    """
    leaf, sharded = tensors.leaf_of(name), tensor or source.tensors[name]
    if tensor is None:
        check_parts(source, name)
    is_turned = leaf.conv1d and source.conv1d  # [in, out] in the source
    shape = list(sharded.shape)
    if name in tensors.VOCABULARY:
        shape[0] = source.model.vocab_size
    turn = leaf.conv1d and is_turned != conv1d
    whole = torch.empty(shape[::-1] if turn else shape, dtype=dtype or sharded.dtype)
    order = None
    if leaf.module.name == tensors.QKV and source.qkv != qkv:
        rows = torch.arange(shape[-1 if is_turned else 0])
        order = qkv.join(source.qkv.split(rows, source.model.n_head)).argsort()
    _fill(whole.t() if turn else whole, sharded, axis=-1 if is_turned else 0, order=order)
    return whole


def _fill(target: Tensor, sharded: Sharded, axis: int, order: Tensor | None) -> None:
    """Copy the first rows of a tensor into `target`, which may be a transpose.

    `order`: the target's index along `axis` for each index of the source. Bands of rows are read,
    converted and copied in the cache: half the time of transposing a whole matrix.
    """
    order = torch.arange(target.shape[axis]) if order is None else order
    for offset, band in sharded.rows(0, len(target)).bands(_BAND):
        band = band.to(target.dtype)  # copying and converting at once is ten times slower for a transpose
        at = [slice(start, start + size) for start, size in zip(offset, band.shape, strict=True)]
        indices, at[axis] = order[at[axis]], slice(None)
        ends = (indices.diff() != 1).nonzero().flatten() + 1  # of the runs of rows that stay together
        for first, last in pairwise([0, *ends.tolist(), len(indices)]):
            part = target[tuple(at)].narrow(axis, int(indices[first]), last - first)
            part.copy_(band.narrow(axis, first, last - first))


def check_parts(source: Source, name: str) -> None:
    """CheckpointError naming the files if two ranks have the same part of the matrix `name`."""
    leaf, rows = tensors.leaf_of(name), source.model.vocab_size if name in tensors.VOCABULARY else math.inf
    if leaf.kind == "weight" and leaf.split is not None:
        # padding may repeat a row
        check_distinct(block.tensor for block in source.tensors[name].blocks if block.offset[0] < rows)


def prefetched(source: Source, wanted: Mapping[str, torch.dtype], *, qkv: QKV, conv1d: bool) -> Iterator[Tensor]:
    """`assemble` each of `wanted` as its type, prefetched by a thread.

    The caller must not keep a tensor while it asks for the next one. Raises CheckpointError naming
    the tensor if a finite value is infinite in that type.
    """

    def make(name: str) -> Tensor:
        tensor = assemble(source, name, qkv=qkv, conv1d=conv1d, dtype=wanted[name])
        _check_range(source, name, tensor)
        return tensor

    return prefetch(make, wanted, _IN_FLIGHT)


def prefetch(function: Callable[[Item], Tensor], items: Iterable[Item], in_flight: int) -> Iterator[Tensor]:
    """`map(function, items)`; a thread computes up to `in_flight` tensors ahead of the caller."""

    def on_one_core(item: Item) -> Tensor:
        torch.set_num_threads(1)  # of this thread: more would compete with the caller
        return function(item)

    return threaded_map(on_one_core, items, 1, in_flight)


def widest_dtype(source: Source) -> torch.dtype:
    """The narrowest type that holds all values of a source exactly."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in source.tensors.values()))


def _check_range(source: Source, name: str, tensor: Tensor) -> None:
    """CheckpointError if a finite value became infinite."""
    limit, stored = torch.finfo(tensor.dtype).max, source.tensors[name].dtype
    if torch.finfo(stored).max <= limit:
        return
    if all(value.isfinite() for value in tensor.aminmax()):  # both are NaN if any value is; much faster than all values
        return
    original = assemble(source, name, qkv=source.qkv, conv1d=source.conv1d)
    largest = original[original.isfinite()].abs().max()
    if largest.to(tensor.dtype).isinf():
        raise CheckpointError(
            f"tensor {name!r}: its largest value, {float(largest):g}, is too large for "
            f"{str(tensor.dtype).removeprefix('torch.')} ({limit:g} at most); choose another --dtype"
        )
