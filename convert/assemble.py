"""Whole tensors of a source, in the layout that a writer asks for; the next ones while one is written."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.sources.consistency import check_distinct
from convert.sources.source import QKV, Sharded, Source
from convert.stored import StoredTensor
from training import tensors

OURS = QKV(3)
"""The order of our own checkpoints: [head, (q, k, v), dim]."""
HUGGING_FACE = QKV(0)
"""[(q, k, v), head, dim]."""
_AHEAD = 4  # tensors: matrices and biases alternate, so that there are two matrices among them


def assemble(
    source: Source,
    name: str,
    *,
    qkv: QKV = OURS,
    conv1d: bool = False,
    dtype: torch.dtype | None = None,
    tensor: Sharded | None = None,
) -> Tensor:
    """The tensor `name`, contiguous, without vocabulary padding: the qkv rows in the order `qkv`, matrices [out, in].

    With `conv1d` the matrices of layers are [in, out]. `tensor` is another one of the same name, such as a moment.
    Bit-exact unless `dtype` asks for another type. Holds the result and at most two tensors of its size besides. Raises
    CheckpointError naming the files if two ranks have the same part of a matrix.
    """
    leaf, sharded = tensors.leaf_of(name), tensor or source.tensors[name]
    rows = source.model.vocab_size if name in tensors.VOCABULARY else None
    if tensor is None:
        check_parts(source, name)
    reorder = leaf.module.name == tensors.QKV and source.qkv != qkv
    turned = leaf.conv1d and source.conv1d  # [in, out] now
    if leaf.conv1d and turned != conv1d and not reorder and _are_columns(sharded):
        return _read_turned(sharded, dtype)
    whole = read_sharded(sharded, dtype, rows)
    if reorder:
        ordered = (whole.t() if turned else whole).contiguous()
        whole, turned = qkv.join(source.qkv.split(ordered, source.model.n_head)), False
    if leaf.conv1d and turned != conv1d:
        whole = whole.t()
    return whole.contiguous()


def check_parts(source: Source, name: str) -> None:
    """CheckpointError naming the files if two ranks have the same part of the matrix `name`."""
    leaf, rows = tensors.leaf_of(name), source.model.vocab_size if name in tensors.VOCABULARY else math.inf
    if leaf.kind == "weight" and leaf.split is not None:
        # not of padding, which repeats a row
        check_distinct(block.tensor for block in source.tensors[name].blocks if block.offset[0] < rows)


def prefetched(source: Source, wanted: Mapping[str, torch.dtype], *, qkv: QKV, conv1d: bool) -> Iterator[Tensor]:
    """`assemble` for each of `wanted`, in its type, by a thread that is a few tensors ahead of the caller.

    The caller must not keep a tensor while it asks for the next one. Raises CheckpointError naming the tensor if a
    finite value is infinite in that type.
    """

    def make(name: str, dtype: torch.dtype) -> Tensor:
        tensor = assemble(source, name, qkv=qkv, conv1d=conv1d, dtype=dtype)
        _check_range(source, name, tensor)
        return tensor

    started: deque[Future[Tensor]] = deque()
    # one thread for its operations, too: more would compete with the writer
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for item in wanted.items():
                started.append(pool.submit(make, *item))
                if len(started) > _AHEAD:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:  # after an error of the writer, too
            pool.shutdown(cancel_futures=True)


def widest_dtype(source: Source) -> torch.dtype:
    """The type that holds all values of a source exactly; if all tensors have the same type, that one."""
    found = {block.tensor.dtype for tensor in source.tensors.values() for block in tensor.blocks}
    return reduce(torch.promote_types, found)


def read_sharded(sharded: Sharded, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
    """All blocks in one tensor, or its first `rows` rows."""
    first = sharded.blocks[0].tensor
    dtype = dtype or first.dtype
    count = sharded.shape[0] if rows is None else min(rows, sharded.shape[0])
    if len(sharded.blocks) == 1:
        return (first if count == sharded.shape[0] else first.rows(0, count)).read().to(dtype)
    whole = torch.empty((count, *sharded.shape[1:]), dtype=dtype)
    for offset, stored in sharded.blocks:
        height = min(stored.shape[0], count - offset[0])
        if height > 0:
            wanted = stored if height == stored.shape[0] else stored.rows(0, height)
            place = tuple(slice(start, start + size) for start, size in zip(offset, wanted.shape, strict=True))
            if isinstance(wanted, StoredTensor):
                wanted.read_into(whole[place])
            else:
                whole[place] = wanted.read()
    return whole


def _are_columns(sharded: Sharded) -> bool:
    """Whether each block has all rows."""
    return all(block.tensor.shape[0] == sharded.shape[0] for block in sharded.blocks)


def _read_turned(sharded: Sharded, dtype: torch.dtype | None) -> Tensor:
    """The transpose of a matrix whose blocks are columns: each block becomes rows, which are contiguous."""
    turned = torch.empty(sharded.shape[::-1], dtype=dtype or sharded.blocks[0].tensor.dtype)
    for offset, stored in sharded.blocks:
        # converted first: copying and converting at once is ten times slower for a transpose
        turned[offset[1] : offset[1] + stored.shape[1]] = stored.read().to(turned.dtype).t()
    return turned


def _check_range(source: Source, name: str, tensor: Tensor) -> None:
    """CheckpointError if a finite value became infinite."""
    limit, stored = torch.finfo(tensor.dtype).max, source.tensors[name].blocks[0].tensor.dtype
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
