"""Cross-entropy over a vocabulary that may be split over processes, from logits that are read once and then replaced.

    found = statistics(logits, targets, first=0, rows=50257)  # (N, 3): max, sum of exp(logit - max), target's logit
    log_sum_exp = found[:, 0] + found[:, 1].log()
    loss = log_sum_exp - found[:, 2]
    backward_(logits, targets, log_sum_exp, gradient, first=0, rows=50257)  # logits are now their gradient

Column j of logits is the vocabulary row first + j; columns from `rows` on are padding. Processes that hold other parts
of the vocabulary combine their statistics between the two calls.
"""

import torch
from torch import Tensor

from training.kernels import library

IGNORED = -100
"""The target that counts nothing."""

_LOWEST = torch.finfo(torch.float32).min  # the max of no columns: finite, so that it can be subtracted


def statistics(logits: Tensor, targets: Tensor, first: int, rows: int) -> Tensor:
    """(N, V), (N,) int64 -> (N, 3) float32: max, sum of exp(logit - max), and the target's logit, of this part.

    A target in another part, or IGNORED, gives 0 as its logit.
    """
    if library.selected("cross_entropy", logits):
        found: Tensor = torch.ops.gpt2.cross_entropy_statistics(logits, targets, first, rows)
        return found
    return reference_statistics(logits, targets, first, rows)


def backward_(logits: Tensor, targets: Tensor, log_sum_exp: Tensor, gradient: Tensor, first: int, rows: int) -> None:
    """Replace logits (N, V) by (exp(logit - log_sum_exp) - [is target]) * gradient, with both (N,) float32.

    Padding columns, and rows whose target is IGNORED, become 0.
    """
    if library.selected("cross_entropy", logits):
        torch.ops.gpt2.cross_entropy_backward_(logits, targets, log_sum_exp, gradient, first, rows)
    else:
        reference_backward_(logits, targets, log_sum_exp, gradient, first, rows)


def reference_statistics(logits: Tensor, targets: Tensor, first: int, rows: int) -> Tensor:
    """`statistics` in PyTorch; in float64 if logits are."""
    values = logits[:, :rows].to(torch.promote_types(logits.dtype, torch.float32))
    highest = values.new_full((len(values),), _LOWEST)
    if rows:
        highest = torch.maximum(values.amax(1), highest)
    total = (values - highest[:, None]).exp().sum(1)
    local = targets - first
    here = (local >= 0) & (local < rows)
    logit = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0].to(values.dtype)
    return torch.stack([highest, total, torch.where(here, logit, 0)], dim=1)


def reference_backward_(
    logits: Tensor, targets: Tensor, log_sum_exp: Tensor, gradient: Tensor, first: int, rows: int
) -> None:
    """`backward_` in PyTorch."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = columns == (targets - first)[:, None]  # (N, V)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = ((values - log_sum_exp[:, None]).exp() - is_target.to(values.dtype)) * gradient[:, None]
    logits.copy_(torch.where((columns < rows) & (targets != IGNORED)[:, None], found, 0))


@torch.library.custom_op("gpt2::cross_entropy_statistics", mutates_args=())
def _statistics(logits: Tensor, targets: Tensor, first: int, rows: int) -> Tensor:
    found = logits.new_empty(len(logits), 3, dtype=torch.float32)
    library.call(
        "cross_entropy_statistics", logits.device,
        logits, targets.contiguous(), found, *logits.shape, first, rows, library.dtype_code(logits.dtype),
    )  # fmt: skip
    return found


@_statistics.register_fake
def _(logits: Tensor, targets: Tensor, first: int, rows: int) -> Tensor:
    return logits.new_empty(len(logits), 3, dtype=torch.float32)


@torch.library.custom_op("gpt2::cross_entropy_backward_", mutates_args={"logits"})
def _backward_(logits: Tensor, targets: Tensor, log_sum_exp: Tensor, gradient: Tensor, first: int, rows: int) -> None:
    library.call(
        "cross_entropy_backward", logits.device,
        logits, targets.contiguous(), log_sum_exp.float().contiguous(), gradient.float().contiguous(),
        *logits.shape, first, rows, IGNORED, library.dtype_code(logits.dtype),
    )  # fmt: skip
