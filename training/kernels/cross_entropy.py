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
    """`statistics` in PyTorch; in float64 if logits are. A copy of a few rows exists at a time."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    highest = logits.new_full((len(logits),), _LOWEST, dtype=dtype)
    total = torch.zeros_like(highest)
    if rows:
        for part in _parts(logits):
            values = logits[part, :rows].to(dtype)
            highest[part] = values.amax(1).clamp_(min=_LOWEST)
            total[part] = (values - highest[part, None]).exp_().sum(1)
    local = targets - first
    here = (local >= 0) & (local < rows)
    logit = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0].to(dtype)
    return torch.stack([highest, total, torch.where(here, logit, 0)], dim=1)


def _parts(logits: Tensor) -> list[slice]:
    """Slices of rows: on a CPU as many as fit its cache, on a GPU enough to keep it busy."""
    size = max(1, (1 << 26 if logits.is_cuda else 1 << 18) // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def reference_backward_(
    logits: Tensor, targets: Tensor, log_sum_exp: Tensor, gradient: Tensor, first: int, rows: int
) -> None:
    """`backward_` in PyTorch. A copy of a few rows exists at a time."""
    local = targets - first
    here = (local >= 0) & (local < rows)
    factor = gradient.masked_fill(targets == IGNORED, 0)
    for part in _parts(logits):
        values = logits[part, :rows].to(torch.promote_types(logits.dtype, torch.float32))  # float32: no copy
        values.sub_(log_sum_exp[part, None]).exp_()
        if rows:  # not scatter_add_, which has no deterministic form on GPUs
            row = torch.arange(len(values), device=logits.device)
            values[row, torch.where(here, local, 0)[part]] -= here[part].to(values.dtype)
        values.mul_(factor[part, None])
        logits[part, :rows] = values
    logits[:, rows:] = 0


@torch.library.custom_op("gpt2::cross_entropy_statistics", mutates_args=())
def _statistics(logits: Tensor, targets: Tensor, first: int, rows: int) -> Tensor:
    found = _statistics_like(logits)
    library.call(
        "cross_entropy_statistics", logits.device,
        logits, targets.contiguous(), found, *logits.shape, first, rows, library.dtype_code(logits.dtype),
    )  # fmt: skip
    return found


_statistics.register_fake(lambda logits, *_: _statistics_like(logits))


def _statistics_like(logits: Tensor) -> Tensor:
    return logits.new_empty(len(logits), 3, dtype=torch.float32)


@torch.library.custom_op("gpt2::cross_entropy_backward_", mutates_args={"logits"})
def _backward_(logits: Tensor, targets: Tensor, log_sum_exp: Tensor, gradient: Tensor, first: int, rows: int) -> None:
    library.call(
        "cross_entropy_backward", logits.device,
        logits, targets.contiguous(), log_sum_exp.float().contiguous(), gradient.float().contiguous(),
        *logits.shape, first, rows, IGNORED, library.dtype_code(logits.dtype),
    )  # fmt: skip
