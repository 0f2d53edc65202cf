"""The operations that the model calls: kernels of our own where they are selected, PyTorch's everywhere else.

    y = ops.attention(q, k, v, p)
    x, y = ops.residual_norm(x, y, p, weight, bias, eps)
    y = ops.linear_gelu(y, weight, bias)
    x = ops.residual(x, y, p)

All take plain tensors; `p` is the probability of dropout, 0 outside training. What PyTorch fuses better than its parts
suggest stands here in its best form: a bias in the product, a mask that is stored instead of drawn again.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from training.kernels.gelu import bias_gelu
from training.kernels.library import selected
from training.kernels.residual import add_dropout_norm


def attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v with a causal mask: (B, nh, T, hs) three times -> (B, nh, T, hs)."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU in its tanh form of a matrix product: (…, in), (out, in), (out,) -> (…, out)."""
    if selected("bias_gelu", x):
        return bias_gelu(F.linear(x, weight), bias)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def residual(x: Tensor, branch: Tensor, p: float) -> Tensor:
    """x + dropout(branch): (B, T, C) twice -> (B, T, C)."""
    return x + (F.dropout(branch, p) if p else branch)


def residual_norm(
    x: Tensor, branch: Tensor, p: float, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch), and its LayerNorm: (B, T, C) twice, (C,) twice -> (B, T, C) twice."""
    if selected("add_dropout_norm", x):
        # a seed and an offset from the device's generator, which recomputation rewinds
        seed = torch.randint(2**62, (2,), device=x.device) if p else None
        return add_dropout_norm(x, branch, p, seed, weight, bias, eps)
    x = residual(x, branch, p)
    return x, F.layer_norm(x, weight.shape, weight, bias, eps)
