"""The training loss: head and cross-entropy in one call, on one device or with the vocabulary split over ranks.

    head = LossHead(vocab_size=50257)
    loss = head(x, wte.weight, targets)  # (B, T, C), (V, C), (B, T) -> float32 nats, summed, ()

The logits are the largest tensor of a step: 1.6 GB in bfloat16 at 16 x 1,024 tokens and 50,304 rows. In eager mode the
gradient overwrites them. Compiled, a plain formula lets the compiler fuse everything between the two matrix products.
`chunks` above 1 never holds more than that part of them: each part's gradients are computed in the forward pass.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F

from training.kernels.cross_entropy import IGNORED, backward_, statistics

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class Vocabulary(NamedTuple):
    """The rows of the token embedding that a rank holds; rows after the true ones are padding."""

    first: int
    """The first row's id."""
    rows: int
    """How many of the local rows are true ones."""
    group: "GroupName | None" = None
    """The process group over which the vocabulary is split; None: it is whole."""


class LossHead(nn.Module):
    """The head and the summed cross-entropy over targets that are not IGNORED."""

    def __init__(self, vocab_size: int, chunks: int = 1) -> None:
        super().__init__()
        self.vocabulary, self.chunks = Vocabulary(0, vocab_size), chunks

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """(B, T, C), (V, C), (B, T) -> float32 nats, summed, ()."""
        x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
        if self.chunks > 1:
            chunked: Tensor = _Chunked.apply(x, weight, targets, self.vocabulary, self.chunks)  # type: ignore[no-untyped-call]
            return chunked
        logits = F.linear(x, weight.to(x.dtype))
        if torch.compiler.is_compiling():
            return _formula(logits, targets, self.vocabulary)
        loss: Tensor = _InPlace.apply(logits, targets, self.vocabulary)  # type: ignore[no-untyped-call]
        return loss


def _formula(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(N, V), (N,) -> (): the loss in operations that a compiler can fuse."""
    first, rows, group = vocabulary
    column = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.float().masked_fill(column >= rows, -torch.inf)
    if not group:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")  # the compiler knows it
    largest = all_reduce(logits.detach().amax(dim=1), "max", group)
    exponentials = (logits - largest[:, None]).exp().sum(dim=1)
    at_target = torch.where(column == (targets - first)[:, None], logits, 0.0).sum(dim=1)
    total, hit = _sum_over_ranks(torch.stack([exponentials, at_target]), group)
    losses: Tensor = (largest + total.log() - hit).masked_fill(targets == IGNORED, 0.0)
    return losses.sum()


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient each rank passes on as it is: every rank computes the same loss from it."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor, group: "GroupName") -> Tensor:
        total: Tensor = all_reduce(values, "sum", group)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum_over_ranks(values: Tensor, group: "GroupName") -> Tensor:
    total: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def _losses(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(N, V), (N,) -> the loss of each target, 0 where it is IGNORED, and log(sum(exp(logits))): float32 (N,) twice."""
    first, rows, group = vocabulary
    largest, total, hit = statistics(logits, targets, first, rows).unbind(dim=1)
    if group:
        overall = all_reduce(largest, "max", group)
        total, hit = all_reduce(torch.stack([total * (largest - overall).exp(), hit]), "sum", group)
        largest = overall
    log_sum_exp = largest + total.log()
    return (log_sum_exp - hit).masked_fill(targets == IGNORED, 0.0), log_sum_exp


class _InPlace(torch.autograd.Function):
    """Cross-entropy whose gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        losses, log_sum_exp = _losses(logits, targets, vocabulary)
        ctx.save_for_backward(logits, targets, log_sum_exp)
        ctx.vocabulary, ctx.spent = vocabulary, False
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.spent:
            raise RuntimeError("the loss can be differentiated only once: its gradient overwrites the logits")
        ctx.spent = True
        logits, targets, log_sum_exp = ctx.saved_tensors
        first, rows, _ = ctx.vocabulary
        backward_(logits, targets, log_sum_exp, gradients[0].float().expand(len(targets)), first, rows)
        return logits, None, None


class _Chunked(torch.autograd.Function):
    """Head and cross-entropy over parts of the tokens; the gradients exist after the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, chunks: int) -> Tensor:
        matrix, differentiate = weight.to(x.dtype), any(ctx.needs_input_grad)
        size = -(-len(x) // chunks)
        total = torch.zeros((), device=x.device)
        of_x = torch.empty_like(x) if differentiate else x
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if differentiate else weight
        ones = torch.ones(size, device=x.device)
        for start in range(0, len(x), size):
            part, wanted, of_part = (tensor[start : start + size] for tensor in (x, targets, of_x))
            logits = F.linear(part, matrix)
            losses, log_sum_exp = _losses(logits, wanted, vocabulary)
            total = total + losses.sum()  # in place, torch 2.11 would compile a loss without a gradient
            if differentiate:
                backward_(logits, wanted, log_sum_exp, ones[: len(part)], vocabulary.first, vocabulary.rows)
                torch.mm(logits, matrix, out=of_part)
                if logits.dtype == torch.float32:
                    of_weight.addmm_(logits.t(), part)
                else:
                    of_weight += logits.t() @ part
            del logits
        if differentiate:
            ctx.save_for_backward(of_x, of_weight)
            ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        factor = gradients[0]
        return (of_x * factor).to(of_x.dtype), (of_weight * factor).to(ctx.dtype), None, None, None
