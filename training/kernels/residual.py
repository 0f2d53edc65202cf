"""The residual stream: x + dropout(branch), alone or with the LayerNorm that follows.

Dropout draws its mask from `seed`, a (2,) int64 tensor [seed, offset] on x's device (see philox.py), so the backward
pass draws it again and stores nothing. Kernels and references keep the same elements, bit for bit. With p = 0 `seed` is
not read and may be None. All tensors have one type: float32, float16 or bfloat16.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.kernels import library
from training.kernels.library import check_columns, dtype_code, form, rows_of
from training.kernels.philox import dropout_mask, kept, scale

NORM_BLOCKS = 528  # of the LayerNorm's backward, each with partial sums: four for each of an H100's 132 SMs run at once


def add_dropout(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """x + dropout(branch): (…, C) twice -> (…, C)."""
    if library.selected("add_dropout", x):
        result: Tensor = torch.ops.gpt2.add_dropout(x, branch, p, seed)
        return result
    return reference_add_dropout(x, branch, p, seed)


def add_dropout_norm(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch) and its LayerNorm over C: both (…, C); weight and bias are (C,)."""
    if library.selected("add_dropout_norm", x):
        total, normed, _, _ = torch.ops.gpt2.add_dropout_norm(x, branch, p, seed, weight, bias, eps)
        return total, normed
    return reference_add_dropout_norm(x, branch, p, seed, weight, bias, eps)


def reference_add_dropout(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`add_dropout` in plain PyTorch."""
    if p > 0:
        assert seed is not None
        branch = torch.where(dropout_mask(branch.shape, p, seed), branch * scale(p), 0.0)
    return x + branch


def reference_add_dropout_norm(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_dropout_norm` in plain PyTorch."""
    total = reference_add_dropout(x, branch, p, seed)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


def _check(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    if branch.shape != x.shape or branch.dtype != x.dtype:
        raise ValueError(f"branch {form(branch)} beside x {form(x)}: shapes and types must be equal")
    if p != 0 and (seed is None or seed.shape != (2,) or seed.dtype != torch.int64):
        raise ValueError(f"dropout {p}: needs a seed of shape (2,) and type int64")


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.custom_op("gpt2::add_dropout", mutates_args=())
def _add(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> Tensor:
    _check(x, branch, p, seed)
    total = _like(x)
    library.call(
        "add_dropout", x.device,
        x.contiguous(), branch.contiguous(), _contiguous(seed), total,
        rows_of(x), x.shape[-1], kept(p), dtype_code(x.dtype),
    )  # fmt: skip
    return total


@_add.register_fake
def _(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return _like(x)


@torch.library.custom_op("gpt2::add_dropout_backward", mutates_args=())
def _add_backward(gradient: Tensor, p: float, seed: Tensor) -> Tensor:
    """The gradient of branch."""
    gradient = gradient.contiguous()
    d_branch = _like(gradient)
    library.call(
        "add_dropout_backward", gradient.device,
        gradient, seed.contiguous(), d_branch,
        rows_of(gradient), gradient.shape[-1], kept(p), dtype_code(gradient.dtype),
    )  # fmt: skip
    return d_branch


@_add_backward.register_fake
def _(gradient: Tensor, p: float, seed: Tensor) -> Tensor:
    return _like(gradient)


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _add_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    return gradient, _add_backward(gradient, ctx.p, seed) if ctx.p else gradient, None, None


_add.register_autograd(_add_gradients, setup_context=_add_save)


@torch.library.custom_op("gpt2::add_dropout_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, the normed rows, and each row's mean and reciprocal standard deviation in float32."""
    _check(x, branch, p, seed)
    check_columns(x, weight, bias)
    outputs = _norm_outputs(x)
    library.call(
        "add_dropout_norm", x.device,
        x.contiguous(), branch.contiguous(), _contiguous(seed), weight.contiguous(), bias.contiguous(), *outputs,
        rows_of(x), x.shape[-1], kept(p), eps, dtype_code(x.dtype),
    )  # fmt: skip
    return outputs


@_norm.register_fake
def _(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _norm_outputs(x)


def _norm_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return _like(x), _like(x), mean, rstd


@torch.library.custom_op("gpt2::add_dropout_norm_backward", mutates_args=())
def _norm_backward(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, branch, weight and bias; branch's is empty where it is x's.

    An operator must not return one tensor twice.
    """
    rows, columns = rows_of(total), total.shape[-1]
    partial = total.new_empty(min(rows, NORM_BLOCKS), 2, columns, dtype=torch.float32)
    outputs = _norm_gradients_like(total, p)
    d_x, d_branch, d_weight, d_bias = outputs
    library.call(
        "add_dropout_norm_backward", total.device,
        _contiguous(d_total), d_normed.contiguous(), total, mean, rstd, _contiguous(seed), weight.contiguous(),
        d_x, d_branch if p else None, d_weight, d_bias, partial,
        rows, columns, len(partial), kept(p), dtype_code(total.dtype),
    )  # fmt: skip
    return outputs


@_norm_backward.register_fake
def _(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _norm_gradients_like(total, p)


def _norm_gradients_like(total: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_branch = torch.empty_like(total) if p else total.new_empty(0)
    return torch.empty_like(total), d_branch, total.new_empty(total.shape[-1]), total.new_empty(total.shape[-1])


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ctx.p, seed, weight, _, _ = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, mean, rstd, weight, seed)


def _norm_gradients(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight, seed = ctx.saved_tensors
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    d_x, d_branch, d_weight, d_bias = _norm_backward(d_total, d_normed, total, mean, rstd, weight, ctx.p, seed)
    return d_x, d_branch if ctx.p else d_x, None, None, d_weight, d_bias, None


_norm.register_autograd(_norm_gradients, setup_context=_norm_save)
