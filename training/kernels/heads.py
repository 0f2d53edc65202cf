"""Queries, keys and values from one product; their gradients are put together, and summed for the bias, in one pass.

The product's columns are ordered [head, (q, k, v), dim]. Tensors have one type: float32, float16 or bfloat16.
"""

from typing import Any

import torch
from torch import Tensor

from training.kernels import library
from training.kernels.library import dtype_code, strips

Heads = tuple[Tensor, Tensor, Tensor]


def split_heads(qkv: Tensor, bias: Tensor, head_size: int) -> Heads:
    """(B, T, 3C) -> q, k and v, (B, nh, T, hs) each; `bias`, (3C,), is in qkv already: here it gets its gradient."""
    if library.selected("pack_heads", qkv):
        parts: Heads = _Split.apply(qkv, bias, head_size)  # type: ignore[no-untyped-call]
        return parts
    return reference_split_heads(qkv, bias, head_size)


def reference_split_heads(qkv: Tensor, bias: Tensor, head_size: int) -> Heads:
    """`split_heads` in plain PyTorch."""
    return heads_of(qkv + (bias - bias.detach()), head_size)


def heads_of(qkv: Tensor, head_size: int) -> Heads:
    """(B, T, 3C) -> q, k and v, (B, nh, T, hs) each, as views."""
    B, T, _ = qkv.shape
    q, k, v = qkv.view(B, T, -1, 3, head_size).transpose(1, 2).unbind(dim=3)  # (B, nh, T, 3, hs) -> (B, nh, T, hs)
    return q, k, v


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, head_size: int) -> Heads:
        return heads_of(qkv, head_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_pack(*gradients), None


@torch.library.custom_op("gpt2::pack_heads", mutates_args=())
def _pack(d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of qkv and of its bias: (B, nh, T, hs) three times -> (B, T, 3C), (3C,)."""
    d_qkv, d_bias = outputs = _outputs(d_q)
    columns = d_qkv.shape[-1]
    rows = d_qkv.shape[0] * d_qkv.shape[1]
    partial = d_q.new_empty(strips(rows, columns), columns, dtype=torch.float32)
    sources = [
        each.transpose(1, 2).contiguous() for each in (d_q, d_k, d_v)
    ]  # as attention's backward pass leaves them
    library.call(
        "pack_heads", d_q.device, *sources, d_qkv, d_bias, partial,
        rows, columns, d_q.shape[-1], len(partial), dtype_code(d_q.dtype),
    )  # fmt: skip
    return outputs


def _outputs(like: Tensor) -> tuple[Tensor, Tensor]:
    B, heads, T, size = like.shape
    return like.new_empty(B, T, 3 * heads * size), like.new_empty(3 * heads * size)


_pack.register_fake(lambda d_q, d_k, d_v: _outputs(d_q))
