"""The residual stream: x + dropout(branch + bias), alone or with the LayerNorm that follows.

Dropout draws its mask from `seed`, a (2,) int64 tensor [seed, offset] on x's device (see philox.py), so the backward
pass draws it again and stores nothing. Kernels and references keep the same elements, bit for bit. With p = 0 `seed` is
not read and may be None.

x may be float32, float16 or bfloat16. `branch` has x's type, or a 16-bit type where x is float32. Biases and the
LayerNorm's weight have x's type; the normed output has the branch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.kernels import library
from training.kernels.library import dtype_code
from training.kernels.philox import DRAWS, dropout_mask, kept, scale
from training.kernels.shapes import check_columns, check_pair, contiguous, form, rows_of, strips

NORM_BLOCKS = 528  # of the LayerNorm's backward, each with partial sums: four for each of an H100's 132 SMs run at once


def add_dropout(x: Tensor, branch: Tensor, bias: Tensor | None, p: float, seed: Tensor | None) -> Tensor:
    """x + dropout(branch + bias): (…, C), (…, C), (C,) or None -> (…, C)."""
    if library.selected("add_dropout", x):
        result: Tensor = torch.ops.gpt2.add_dropout(x, branch, bias, p, seed)
        return result
    return reference_add_dropout(x, branch, bias, p, seed)


def add_dropout_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch + bias) and its LayerNorm over C: both (…, C); weight and norm_bias are (C,)."""
    if library.selected("add_dropout_norm", x):
        total, normed, _, _ = torch.ops.gpt2.add_dropout_norm(x, branch, bias, p, seed, weight, norm_bias, eps)
        return total, normed
    return reference_add_dropout_norm(x, branch, bias, p, seed, weight, norm_bias, eps)


def reference_add_dropout(x: Tensor, branch: Tensor, bias: Tensor | None, p: float, seed: Tensor | None) -> Tensor:
    """`add_dropout` in plain PyTorch."""
    if bias is not None:
        branch = branch + bias
    if p > 0:
        assert seed is not None
        branch = torch.where(dropout_mask(branch.shape, p, seed), branch * scale(p), 0.0)
    return x + branch


def reference_add_dropout_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`add_dropout_norm` in plain PyTorch."""
    total = reference_add_dropout(x, branch, bias, p, seed)
    return total, F.layer_norm(total, weight.shape, weight, norm_bias, eps).to(branch.dtype)


# The kernels as operators. An operator must not return one tensor twice, nor an argument: where the gradient of
# `branch` is that of x, it returns an empty tensor instead.


def _check(x: Tensor, branch: Tensor, parameters: list[Tensor | None], p: float, seed: Tensor | None) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    if branch.shape != x.shape:
        raise ValueError(f"branch {form(branch)} beside x {form(x)}: shapes must be equal")
    check_pair(x, branch)
    for parameter in parameters:
        check_columns(x, parameter, x.dtype)
    if p != 0 and (seed is None or seed.shape != (2,) or seed.dtype != torch.int64):
        raise ValueError(f"dropout {p}: needs a seed of shape (2,) and type int64")


def _d_branch(gradient: Tensor, branch_type: torch.dtype, p: float) -> Tensor:
    """Room for the gradient of `branch`, or an empty tensor if it is `gradient`."""
    shared = kept(p) == DRAWS and branch_type == gradient.dtype
    return gradient.new_empty(0 if shared else gradient.shape, dtype=branch_type)


def _address(tensor: Tensor) -> Tensor | None:
    """The tensor as a launcher takes it: a null pointer where it is empty."""
    return tensor if tensor.numel() else None


@torch.library.custom_op("gpt2::add_dropout", mutates_args=())
def _add(x: Tensor, branch: Tensor, bias: Tensor | None, p: float, seed: Tensor | None) -> Tensor:
    _check(x, branch, [bias], p, seed)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    library.call(
        "add_dropout", x.device,
        x.contiguous(), branch.contiguous(), contiguous(bias), contiguous(seed), total,
        rows_of(x), x.shape[-1], kept(p), dtype_code(x.dtype), dtype_code(branch.dtype),
    )  # fmt: skip
    return total


@_add.register_fake
def _(x: Tensor, branch: Tensor, bias: Tensor | None, p: float, seed: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("gpt2::add_dropout_backward", mutates_args=())
def _add_backward(
    gradient: Tensor, p: float, seed: Tensor | None, branch_type: torch.dtype, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of branch and bias; empty where it is `gradient`, and where there is no bias."""
    gradient = gradient.contiguous()
    rows, columns = rows_of(gradient), gradient.shape[-1]
    d_branch = _d_branch(gradient, branch_type, p)
    d_bias = gradient.new_empty(columns if has_bias else 0)
    partial = gradient.new_empty(strips(rows, columns), columns if has_bias else 0, dtype=torch.float32)
    library.call(
        "add_dropout_backward", gradient.device,
        gradient, contiguous(seed), _address(d_branch), _address(d_bias), _address(partial),
        rows, columns, len(partial), kept(p), dtype_code(gradient.dtype), dtype_code(branch_type),
    )  # fmt: skip
    return d_branch, d_bias


@_add_backward.register_fake
def _(
    gradient: Tensor, p: float, seed: Tensor | None, branch_type: torch.dtype, has_bias: bool
) -> tuple[Tensor, Tensor]:
    return _d_branch(gradient, branch_type, p), gradient.new_empty(gradient.shape[-1] if has_bias else 0)


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, branch, bias, ctx.p, seed = inputs
    ctx.branch_type, ctx.has_bias = branch.dtype, bias is not None
    ctx.save_for_backward(seed)


def _add_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    if kept(ctx.p) == DRAWS and ctx.branch_type == gradient.dtype and not ctx.has_bias:
        return gradient, gradient, None, None, None
    d_branch, d_bias = _add_backward(gradient, ctx.p, seed, ctx.branch_type, ctx.has_bias)
    return (
        gradient, d_branch if d_branch.numel() else gradient, d_bias if ctx.has_bias else None, None, None,
    )  # fmt: skip


_add.register_autograd(_add_gradients, setup_context=_add_save)


@torch.library.custom_op("gpt2::add_dropout_norm", mutates_args=())
def _norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, the normed rows, and each row's mean and reciprocal standard deviation in float32."""
    _check(x, branch, [bias, weight, norm_bias], p, seed)
    outputs = _norm_outputs(x, branch)
    library.call(
        "add_dropout_norm", x.device,
        x.contiguous(), branch.contiguous(), contiguous(bias), contiguous(seed),
        weight.contiguous(), norm_bias.contiguous(), *outputs,
        rows_of(x), x.shape[-1], kept(p), eps, dtype_code(x.dtype), dtype_code(branch.dtype),
    )  # fmt: skip
    return outputs


@_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _norm_outputs(x, branch)


def _norm_outputs(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, normed = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, branch))
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return total, normed, mean, rstd


@torch.library.custom_op("gpt2::add_dropout_norm_backward", mutates_args=())
def _norm_backward(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    p: float,
    seed: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, branch, bias, weight and norm_bias; empty where it is x's, and where there is no bias."""
    rows, columns = rows_of(total), total.shape[-1]
    partial = total.new_empty(min(rows, NORM_BLOCKS), 3, columns, dtype=torch.float32)
    outputs = _norm_gradients_like(total, d_normed.dtype, p, has_bias)
    d_x, d_branch, d_bias, d_weight, d_norm_bias = outputs
    library.call(
        "add_dropout_norm_backward", total.device,
        contiguous(d_total), d_normed.contiguous(), total, mean, rstd, contiguous(seed), weight.contiguous(),
        d_x, _address(d_branch), d_weight, d_norm_bias, _address(d_bias), partial,
        rows, columns, len(partial), kept(p), dtype_code(total.dtype), dtype_code(d_normed.dtype),
    )  # fmt: skip
    return outputs


@_norm_backward.register_fake
def _(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    p: float,
    seed: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _norm_gradients_like(total, d_normed.dtype, p, has_bias)


def _norm_gradients_like(
    total: Tensor, branch_type: torch.dtype, p: float, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    columns = total.shape[-1]
    return (
        torch.empty_like(total),
        _d_branch(total, branch_type, p),
        total.new_empty(columns if has_bias else 0),
        total.new_empty(columns),
        total.new_empty(columns),
    )


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, bias, ctx.p, seed, weight, _, _ = inputs
    total, normed, mean, rstd = output
    ctx.has_bias, ctx.branch_type = bias is not None, normed.dtype
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, mean, rstd, weight, seed)


def _norm_gradients(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight, seed = ctx.saved_tensors
    if d_normed is None:
        d_normed = torch.zeros_like(total, dtype=ctx.branch_type)
    d_x, d_branch, d_bias, d_weight, d_norm_bias = _norm_backward(
        d_total, d_normed, total, mean, rstd, weight, ctx.p, seed, ctx.has_bias
    )
    return (
        d_x, d_branch if d_branch.numel() else d_x, d_bias if ctx.has_bias else None, None, None,
        d_weight, d_norm_bias, None,
    )  # fmt: skip


_norm.register_autograd(_norm_gradients, setup_context=_norm_save)
