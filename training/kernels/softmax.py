"""Softmax of attention scores, scaled and causally masked, for devices and shapes without flash attention.

    probabilities = causal_softmax(q @ k.mT, scale=1 / math.sqrt(head_size))  # (B, nh, T, S)

Query t may see keys up to t + S - T: the last T positions of a sequence of S.
"""

import torch
from torch import Tensor

from training.kernels import library


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """(…, T, S) with T <= S -> softmax(scale * scores) over the columns that are not masked, 0 in the others."""
    assert scores.shape[-2] <= scores.shape[-1], "a row without a column has no softmax"
    if library.selected("causal_softmax", scores):
        found: Tensor = torch.ops.gpt2.causal_softmax(scores, scale)
        return found
    return reference_causal_softmax(scores, scale)


def reference_causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """`causal_softmax` in PyTorch; in float64 if scores are."""
    length, columns = scores.shape[-2:]
    mask = torch.ones(length, columns, dtype=torch.bool, device=scores.device).tril(columns - length)
    values = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return values.masked_fill(~mask, -torch.inf).softmax(-1).to(scores.dtype)


@torch.library.custom_op("gpt2::causal_softmax", mutates_args=())
def _forward(scores: Tensor, scale: float) -> Tensor:
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    length, columns = scores.shape[-2:]
    library.call(
        "causal_softmax_forward", scores.device,
        scores, out, scores[..., 0].numel(), length, columns, scale, library.dtype_code(scores.dtype),
    )  # fmt: skip
    return out


@torch.library.custom_op("gpt2::causal_softmax_backward", mutates_args=())
def _backward(probabilities: Tensor, gradient: Tensor, scale: float) -> Tensor:
    probabilities, gradient = probabilities.contiguous(), gradient.contiguous()
    out = torch.empty_like(gradient)
    length, columns = gradient.shape[-2:]
    library.call(
        "causal_softmax_backward", gradient.device,
        probabilities, gradient, out, gradient[..., 0].numel(), length, columns, scale,
        library.dtype_code(gradient.dtype),
    )  # fmt: skip
    return out


@_forward.register_fake
def _(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(probabilities: Tensor, gradient: Tensor, scale: float) -> Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
    (probabilities,) = ctx.saved_tensors  # type: ignore[attr-defined]
    found: Tensor = torch.ops.gpt2.causal_softmax_backward(probabilities, gradient, ctx.scale)  # type: ignore[attr-defined]
    return found, None


_forward.register_autograd(_differentiate, setup_context=_keep)
