"""One whole tensor of a source, in the layout that a writer asks for."""

import torch
from torch import Tensor

from common.errors import CheckpointError
from convert.files.stored import Stored, StoredTensor
from convert.sources.agreement import check_distinct
from convert.sources.ranks import LINEAR, leaf_of
from convert.sources.source import QKV, Sharded, Source

OURS = QKV(3)
"""The order of our own checkpoints: [head, (q, k, v), dim]."""
HUGGING_FACE = QKV(0)
"""[(q, k, v), head, dim]."""


def assemble(
    source: Source,
    name: str,
    *,
    qkv: QKV = OURS,
    conv1d: bool = False,
    dtype: torch.dtype | None = None,
    tensor: Sharded | None = None,
) -> Tensor:
    """The tensor `name`, contiguous, without vocabulary padding: c_attn in the order `qkv`, matrices [out, in].

    With `conv1d` the matrices of layers are [in, out]. `tensor` is another one of the same name, such as a moment.
    Bit-exact unless `dtype` asks for another type. Holds the result and at most two tensors of its size besides. Raises
    CheckpointError if two ranks have the same part of a matrix.
    """
    leaf, sharded = leaf_of(name), tensor or source.tensors[name]
    if leaf in LINEAR and tensor is None:
        check_distinct(block.tensor for block in sharded.blocks)
    reorder = leaf.startswith("attn.c_attn.") and source.qkv != qkv
    turned = leaf in LINEAR and source.conv1d  # [in, out] now
    if leaf in LINEAR and turned != conv1d and not reorder and _are_columns(sharded):
        return _read_turned(sharded, dtype)
    whole = read_sharded(sharded, dtype, source.model.vocab_size if leaf in ("wte.weight", "lm_head.weight") else None)
    if reorder:
        rows = whole.t() if turned else whole
        whole, turned = qkv.join(source.qkv.split(rows.contiguous(), source.model.n_head)), False
    if leaf in LINEAR and turned != conv1d:
        whole = whole.t()
    return whole.contiguous()


def read_sharded(sharded: Sharded, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
    """All blocks in one tensor, or its first `rows` rows."""
    first, stored_type = sharded.blocks[0].tensor, _common_type(sharded)
    dtype = dtype or stored_type
    count = sharded.shape[0] if rows is None else min(rows, sharded.shape[0])
    if len(sharded.blocks) == 1:
        return (first if count == sharded.shape[0] else first.rows(0, count)).read().to(dtype)
    whole = torch.empty((count, *sharded.shape[1:]), dtype=dtype)
    for offset, stored in sharded.blocks:
        height = min(stored.shape[0], count - offset[0])
        if height > 0:
            wanted = stored if height == stored.shape[0] else stored.rows(0, height)
            place = tuple(slice(start, start + size) for start, size in zip(offset, wanted.shape, strict=True))
            _fill(whole[place], wanted)
    return whole


def _are_columns(sharded: Sharded) -> bool:
    """Whether each block has all rows."""
    return all(block.tensor.shape[0] == sharded.shape[0] for block in sharded.blocks)


def _read_turned(sharded: Sharded, dtype: torch.dtype | None) -> Tensor:
    """The transpose of a matrix whose blocks are columns: each block becomes rows, which are contiguous."""
    stored_type = _common_type(sharded)
    turned = torch.empty(sharded.shape[::-1], dtype=dtype or stored_type)
    for offset, stored in sharded.blocks:
        # converted first: copying and converting at once is ten times slower for a transpose
        turned[offset[1] : offset[1] + stored.shape[1]] = stored.read().to(turned.dtype).t()
    return turned


def _common_type(sharded: Sharded) -> torch.dtype:
    first = sharded.blocks[0].tensor.dtype
    for _, stored in sharded.blocks:
        if stored.dtype != first:
            raise CheckpointError(f"its parts have different types: {first} and {stored.dtype}")
    return first


def _fill(target: Tensor, stored: Stored) -> None:
    """Read into a part of a tensor, without a copy in between if that part is contiguous."""
    if isinstance(stored, StoredTensor) and stored.dtype == target.dtype and target.is_contiguous():
        stored.read_into(target)
    else:
        target.copy_(stored.read())
