"""The residual stream: x + dropout(branch) and the LayerNorm that follows.

Dropout draws its mask from `seed`, a (2,) int64 tensor [seed, offset] on x's device, so the
backward pass draws it again and stores nothing; with p = 0 it may be None. Kernels and references
keep the same elements, bit for bit. All tensors have one type: float32, float16 or bfloat16.

The mask is Philox4x32-10's (Salmon et al. 2011). One call with the counter (group, offset) and the
key `seed` gives four 32-bit words, that is eight draws of 16 bits, for the elements from 8 * group
on of a tensor in memory order. An element is kept if its draw is less than `kept(p)`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.kernels import library
from training.kernels.library import dtype_code, empty_like, fit_columns, rows_of

NORM_BLOCKS = 528  # of the LayerNorm's backward, each with partial sums: four for each of an H100's 132 SMs run at once

_GROUP = 8  # elements per call of Philox
_DRAWS = 1 << 16  # values that a draw may have
_MASK = 0xFFFFFFFF
# The paper's multipliers and key increments; a multiplier less 2^32, so no product overflows int64
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def add_dropout_norm(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch) and its LayerNorm over C: both (…, C); weight and bias are (C,)."""
    if library.selected("add_dropout_norm", x):
        total, normed, _, _ = torch.ops.gpt2.add_dropout_norm(x, branch, p, seed, weight, bias, eps)
        return total, normed
    total = reference_add_dropout(x, branch, p, seed)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


def reference_add_dropout(x: Tensor, branch: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """x + dropout(branch) in plain PyTorch, with the mask that the kernel draws."""
    if p > 0:
        assert seed is not None
        branch = torch.where(dropout_mask(branch.shape, p, seed), branch * (_DRAWS / kept(p)), 0.0)
    return x + branch


# -------------------------------------------------------------------------- the mask, in PyTorch


def kept(p: float) -> int:
    """The number of the 65,536 draws that keep an element: p is rounded to a multiple of 2^-16."""
    return round((1 - p) * _DRAWS)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four counter and two key words -> four words, int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of word * (multiplier + 2^32)."""
    product = word * multiplier
    return (product >> 32) + word, product & _MASK


def dropout_mask(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """The elements that dropout keeps: bool, on the seed's device; equal to csrc/common.cuh's."""
    count = shape.numel()
    group = torch.arange(-(-count // _GROUP), device=seed.device)
    key, offset = seed.unbind()
    counter = (group & _MASK, group >> 32, offset & _MASK, (offset >> 32) & _MASK)
    words = torch.stack(philox(counter, (key & _MASK, (key >> 32) & _MASK)), dim=1)  # (groups, 4)
    draws = torch.stack([words % _DRAWS, words // _DRAWS], dim=2)  # (groups, 4, 2): the low half first
    return (draws.flatten()[:count] < kept(p)).view(shape)


# --------------------------------------------------------------------------------- the kernels


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.custom_op("gpt2::add_dropout_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor, p: float, seed: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, the normed rows, and each row's mean and 1 / standard deviation in float32."""
    assert branch.shape == x.shape and branch.dtype == x.dtype and fit_columns(x, weight, bias)
    assert p == 0 or (seed is not None and seed.shape == (2,) and seed.dtype == torch.int64)
    outputs = _norm_outputs(x)
    library.call(
        "add_dropout_norm", x.device,
        x.contiguous(), branch.contiguous(), _contiguous(seed), weight.contiguous(), bias.contiguous(), *outputs,
        rows_of(x), x.shape[-1], kept(p), eps, dtype_code(x.dtype),
    )  # fmt: skip
    return outputs


def _norm_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return empty_like(x), empty_like(x), mean, rstd


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


_norm.register_fake(lambda x, *_: _norm_outputs(x))
_norm_backward.register_fake(
    lambda d_total, d_normed, total, mean, rstd, weight, p, seed: _norm_gradients_like(total, p)
)
_norm.register_autograd(_norm_gradients, setup_context=_norm_save)
