"""The operations that the model calls: kernels of our own where they are selected, PyTorch's everywhere else.

    q, k, v = ops.linear_heads(x, weight, bias, head_size, rounded)
    y = ops.attention(q, k, v, p)
    y = ops.linear(y, weight, bias, rounded)
    y = ops.linear_gelu(y, weight, bias, rounded)

All take plain tensors; `p` is the probability of dropout, 0 outside training. `rounded` is a copy of a weight in the
type of the products, if the model keeps one (`Stage.keep_rounded_weights`). What PyTorch fuses better than its parts
suggest stands here in its best form: a bias in the product, a mask that is stored instead of drawn again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.kernels.documents import document_attention
from training.kernels.gelu import bias_gelu
from training.kernels.heads import Heads, heads_of, split_heads
from training.kernels.library import selected


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
    """Keep a second copy of each matrix in oneDNN's layout, for products of about `rows` rows; for inference on a CPU.

    For 3 to 64 rows MKL takes 1.4 to 2.3 times as long with the plain layout. Only if that much memory is free.
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
    """Queries, keys and values of `linear`: (…, in), (3C, in), (3C,) -> (B, nh, T, hs) three times."""
    if selected("pack_heads", x):
        return split_heads(linear(x, weight, bias.detach(), rounded), bias.to(x.dtype), head_size)
    return heads_of(linear(x, weight, bias, rounded), head_size)
