"""GELU of x + bias in its tanh form (Hendrycks and Gimpel 2016).

x and bias have one type: float32, float16 or bfloat16. The kernels compute in float32 and round once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.kernels import library
from training.kernels.library import dtype_code, empty_like, fit_columns, rows_of, strips


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias): (…, C), (C,) -> (…, C) of x's type."""
    if library.selected("bias_gelu", x):
        result: Tensor = torch.ops.gpt2.bias_gelu(x, bias)
        return result
    return reference_bias_gelu(x, bias)


def reference_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """`bias_gelu` in plain PyTorch."""
    return F.gelu(x + bias, approximate="tanh")


@torch.library.custom_op("gpt2::bias_gelu", mutates_args=())
def _forward(x: Tensor, bias: Tensor) -> Tensor:
    assert fit_columns(x, bias)
    out = empty_like(x)
    library.call(
        "bias_gelu", x.device,
        x.contiguous(), bias.contiguous(), out,
        rows_of(x), x.shape[-1], dtype_code(x.dtype),
    )  # fmt: skip
    return out


@torch.library.custom_op("gpt2::bias_gelu_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
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


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    d_x, d_bias = _backward(gradient, x, bias)
    return d_x, d_bias


_forward.register_fake(lambda x, bias: empty_like(x))
_backward.register_fake(lambda gradient, x, bias: (empty_like(x), empty_like(bias)))
_forward.register_autograd(_gradients, setup_context=_save)
