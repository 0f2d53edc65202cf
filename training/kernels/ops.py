"""The operations that the model calls: our kernels where selected, PyTorch's everywhere else.

    q, k, v = ops.linear_heads(x, weight, bias, head_size, rounded)
    y = ops.attention(q, k, v, p)
    y = ops.linear(y, weight, bias, rounded)
    y = ops.linear_gelu(y, weight, bias, rounded)

All take plain tensors; `p` is the probability of dropout, 0 outside training. `rounded` is a copy
of a weight in the type of the products, if the model keeps one (`Stage.keep_rounded_weights`).
Below are the two ops on a product that have kernels. Their tensors have one type: float32, float16
or bfloat16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.kernels import library
from training.kernels.documents import document_attention
from training.kernels.library import dtype_code, empty_like, fit_columns, rows_of, selected, strips

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (B, nh, T, hs) each."""


def attention(q: Tensor, k: Tensor, v: Tensor, p: float, ends: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v with a causal mask: (B, nh, T, hs) three times -> (B, nh, T, hs).

    With `ends`, (B, K), within documents (`training.kernels.documents`).
    """
    if ends is not None:
        return document_attention(q, k, v, p, ends)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Tensor | None = None) -> Tensor:
    """x W^T + b in x's type: (…, in), (out, in), (out,) -> (…, out)."""
    if rounded is None:
        return _product(x, weight.to(x.dtype), bias)
    product: Tensor = _Linear.apply(x, weight, bias, rounded)  # type: ignore[no-untyped-call]
    return product


class _Linear(torch.autograd.Function):
    """`linear` with the copy of the weight, whose gradient leaves its product in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(x, rounded)
        return _product(x, rounded, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        of_bias = rows.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return gradients[0] @ rounded, float32_product(rows.t(), x.flatten(0, -2)), of_bias, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    packed = getattr(weight, "packed", None)
    if packed is not None and x.shape[:-1].numel() > 2:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Keep a copy of each matrix in oneDNN's layout, for inference with `rows` rows on a CPU.

    For 3 to 64 rows MKL takes 1.4 to 2.3 times as long without. Only if that much memory is free.
    """
    weights = [one for name, one in model.named_parameters() if one.dim() == 2 and name != "wpe.weight"]
    size = sum(weight.nbytes for weight in weights)
    fits = {(weight.device.type, weight.dtype) for weight in weights} == {("cpu", torch.float32)}
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if rows > 2 and fits and has_onednn and 2 * size < psutil.virtual_memory().available:
        for weight in weights:
            vars(weight)["packed"] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    try:
        yield
    finally:
        for weight in weights:
            vars(weight).pop("packed", None)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with a float32 result, as a GPU accumulates it: no rounding, and no separate cast."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else (a @ b).float()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, rounded: Tensor | None = None) -> Tensor:
    """GELU in its tanh form of `linear`: (…, in), (out, in), (out,) -> (…, out)."""
    if selected("bias_gelu", x):
        return bias_gelu(linear(x, weight, None, rounded), bias.to(x.dtype))
    return F.gelu(linear(x, weight, bias, rounded), approximate="tanh")


def linear_heads(x: Tensor, weight: Tensor, bias: Tensor, head_size: int, rounded: Tensor | None = None) -> Heads:
    """Queries, keys and values of `linear`: (…, in), (3C, in), (3C,) -> (B, nh, T, hs) x 3."""
    if selected("pack_heads", x):
        return split_heads(linear(x, weight, bias.detach(), rounded), bias.to(x.dtype), head_size)
    return heads_of(linear(x, weight, bias, rounded), head_size)


# ---------------------------------------------------------------------------------------- GELU


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias in its tanh form (Hendrycks and Gimpel 2016): (…, C), (C,) -> (…, C).

    The kernels compute in float32 and round once, to x's type.
    """
    if not selected("bias_gelu", x):
        return F.gelu(x + bias, approximate="tanh")
    result: Tensor = torch.ops.gpt2.bias_gelu(x, bias)
    return result


@torch.library.custom_op("gpt2::bias_gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    assert fit_columns(x, bias)
    out = empty_like(x)
    library.call(
        "bias_gelu", x.device,
        x.contiguous(), bias.contiguous(), out,
        rows_of(x), x.shape[-1], dtype_code(x.dtype),
    )  # fmt: skip
    return out


@torch.library.custom_op("gpt2::bias_gelu_backward", mutates_args=())
def _gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias."""
    rows, columns = rows_of(x), x.shape[-1]
    d_x, d_bias = empty_like(x), empty_like(bias)
    partial = x.new_empty(strips(rows, columns), columns, dtype=torch.float32)
    library.call(
        "bias_gelu_backward", x.device,
        gradient.contiguous(), x.contiguous(), bias.contiguous(), d_x, d_bias, partial,
        rows, columns, len(partial), dtype_code(x.dtype),
    )  # fmt: skip
    return d_x, d_bias


_gelu.register_fake(lambda x, bias: empty_like(x))
_gelu_backward.register_fake(lambda gradient, x, bias: (empty_like(x), empty_like(bias)))
_gelu.register_autograd(
    lambda ctx, gradient: _gelu_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# -------------------------------------------------------------------- queries, keys and values


def split_heads(qkv: Tensor, bias: Tensor, head_size: int) -> Heads:
    """(B, T, 3C) -> q, k, v, (B, nh, T, hs) each; `bias`, (3C,), in qkv already, gets a gradient.

    The columns of qkv are ordered [head, (q, k, v), dim]. The kernel puts the gradients of q, k and
    v together and sums them for the bias, in one pass.
    """
    if not selected("pack_heads", qkv):
        return heads_of(qkv + (bias - bias.detach()), head_size)
    parts: Heads = _Split.apply(qkv, bias, head_size)  # type: ignore[no-untyped-call]
    return parts


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
    d_qkv, d_bias = outputs = _packed_like(d_q)
    columns = d_qkv.shape[-1]
    rows = d_qkv.shape[0] * d_qkv.shape[1]
    partial = d_q.new_empty(strips(rows, columns), columns, dtype=torch.float32)
    # as attention's backward pass leaves them in memory
    sources = [each.transpose(1, 2).contiguous() for each in (d_q, d_k, d_v)]
    library.call(
        "pack_heads", d_q.device, *sources, d_qkv, d_bias, partial,
        rows, columns, d_q.shape[-1], len(partial), dtype_code(d_q.dtype),
    )  # fmt: skip
    return outputs


def _packed_like(like: Tensor) -> tuple[Tensor, Tensor]:
    B, heads, T, size = like.shape
    return like.new_empty(B, T, 3 * heads * size), like.new_empty(3 * heads * size)


_pack.register_fake(lambda d_q, d_k, d_v: _packed_like(d_q))
