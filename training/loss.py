"""The training loss: head and cross-entropy in one call, with a whole or a split vocabulary.

    head = LossHead(vocab_size=50257)
    head(x, wte.weight, targets, factor).backward()

The logits are the largest tensor of a step: 1.6 GB in bfloat16 at 16 x 1,024 tokens and 50,304
rows. They are read once and replaced by their gradient in the forward pass, which also computes the
gradients of the input and of the weight. So nothing of their size waits for the backward pass, and
no float32 copy of them ever exists. With `chunks` above 1, only one of that many parts does.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F

from training.kernels.ops import float32_product
from training.parallel.sizes import EAGER_ELEMENTS

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

IGNORED = -100  # marks a target without a loss
_LOWEST = torch.finfo(torch.float32).min  # finite, so that it can be subtracted


class Vocabulary(NamedTuple):
    """The rows of the token embedding that a rank holds; rows after the true ones are padding."""

    first: int  # id of the first row
    rows: int  # how many of the local rows are true ones
    group: "GroupName | None" = None  # over which the vocabulary is split; None: it is whole


class LossHead(nn.Module):
    """The head and the summed cross-entropy over targets that are not IGNORED.

    `rounded` is a copy of the head's weight in the type of the products, if the model keeps one.
    """

    rounded: Tensor | None

    def __init__(self, vocab_size: int, chunks: int = 1) -> None:
        super().__init__()
        self.vocabulary, self.chunks = Vocabulary(0, vocab_size), chunks
        self.register_buffer("rounded", None, persistent=False)

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor, factor: Tensor | None = None) -> Tensor:
        """(B, T, C), (V, C), (B, T), (B,) -> nats times each sample's factor, summed: float32, ().

        Its gradients exist already: it can be differentiated with gradient 1 and no other.
        """
        x, weight = self.local(x, weight)
        each = torch.ones(len(x), device=x.device) if factor is None else factor.float()
        flat = x.flatten(0, 1), targets.flatten(), each[:, None].expand_as(targets).flatten()
        training = torch.is_grad_enabled()  # inside an autograd function it never is
        loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            weight, self.rounded, *flat, self.vocabulary, self.chunks, training
        )
        return loss

    def local(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of this rank's product: (B, T, C), (V, C) -> the same two."""
        return x, weight

    def target_losses(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """(B, T, C), (V, C), (B, T) -> nats per target, 0 where IGNORED: float32, (B * T,)."""
        x, weight = self.local(x, weight)
        matrix = _rounded(weight, self.rounded, x)
        parts = zip(x.flatten(0, 1).chunk(self.chunks), targets.flatten().chunk(self.chunks), strict=True)
        return torch.cat([_losses(F.linear(part, matrix), wanted, self.vocabulary)[0] for part, wanted in parts])

    def logits_at(self, position: int, x: Tensor, weight: Tensor) -> Tensor:
        """Logits at a position of the first sample, true rows only: (B, T, C), (V, C) -> (V,)."""
        x, weight = self.local(x, weight)
        return F.linear(x[0, position], _rounded(weight, self.rounded, x))[: self.vocabulary.rows]


def _rounded(weight: Tensor, rounded: Tensor | None, x: Tensor) -> Tensor:
    return weight.to(x.dtype) if rounded is None else rounded


class _Loss(torch.autograd.Function):
    """(V, C) twice, (N, C), (N,), (N,) -> (): the loss; the forward pass computes its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rounded: Tensor | None,
        x: Tensor,
        targets: Tensor,
        factor: Tensor,
        vocabulary: Vocabulary,
        chunks: int,
        training: bool,
    ) -> Tensor:
        matrix, total = _rounded(weight, rounded, x), torch.zeros((), device=x.device)
        of_x: list[Tensor] = []
        of_weight: Tensor | None = None
        for part, wanted, scale in zip(*(tensor.chunk(chunks) for tensor in (x, targets, factor)), strict=True):
            logits = F.linear(part, matrix)
            losses, log_sum_exp = _losses(logits, wanted, vocabulary)
            total = total + (losses * scale).sum()
            if training:
                logits = _gradient(logits, wanted, log_sum_exp, scale, vocabulary)
                of_x.append(logits @ matrix)
                product = float32_product(logits.t(), part)
                of_weight = product if of_weight is None else of_weight.add_(product)
            del logits
        if of_weight is not None:
            ctx.save_for_backward(of_weight.to(weight.dtype), torch.cat(of_x) if chunks > 1 else of_x[0])
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(gradients[0] == 1, "the loss is differentiated with gradient 1; give it a factor instead")
        of_weight, of_x = ctx.saved_tensors
        return of_weight, None, of_x, None, None, None, None, None


def _losses(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(N, V), (N,) -> loss per target (0: IGNORED), log(sum(exp(logits))): float32, (N,) each."""
    statistics = [_statistics(logits[rows], targets[rows], vocabulary) for rows in _parts(logits)]
    largest, total, hit = torch.cat(statistics).unbind(dim=1)
    if vocabulary.group:
        overall = all_reduce(largest, "max", vocabulary.group)
        total, hit = all_reduce(torch.stack([total * (largest - overall).exp(), hit]), "sum", vocabulary.group).unbind()
        largest = overall
    log_sum_exp = largest + total.log()
    return (log_sum_exp - hit).masked_fill(targets == IGNORED, 0.0), log_sum_exp


def _statistics(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(N, V), (N,) -> (N, 3) float32: max, sum of exp(logit - max), target's logit (else 0)."""
    column = torch.arange(logits.shape[1], device=logits.device)
    values = logits.float().masked_fill(column >= vocabulary.rows, _LOWEST)
    largest = values.amax(1, keepdim=True)
    total = (values - largest).exp_().sum(1)
    local = targets - vocabulary.first
    here = (local >= 0) & (local < vocabulary.rows)
    logit = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0].float()
    return torch.stack([largest[:, 0], total, torch.where(here, logit, 0.0)], dim=1)


def _gradient(logits: Tensor, targets: Tensor, log_sum_exp: Tensor, factor: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(N, V), (N,) three times -> the gradient in place of the logits, (N, V).

    (exp(logit - log_sum_exp) - [is target]) * factor; 0 in padding columns and IGNORED rows.
    """
    column = torch.arange(logits.shape[1], device=logits.device)
    counted = factor.masked_fill(targets == IGNORED, 0.0)
    for rows in _parts(logits):
        gradient = logits[rows].float().sub_(log_sum_exp[rows, None]).exp_()
        gradient.add_(column == (targets[rows] - vocabulary.first)[:, None], alpha=-1)
        gradient.mul_(counted[rows, None]).masked_fill_(column >= vocabulary.rows, 0.0)
        if torch.compiler.is_compiling():
            return gradient.to(logits.dtype)  # the compiler puts it where the logits are
        if gradient.dtype != logits.dtype:  # otherwise they are the same memory
            logits[rows] = gradient
    return logits


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of rows: all for a compiler, which fuses everything; else of EAGER_ELEMENTS each."""
    size = len(logits)
    if not torch.compiler.is_compiling():
        size = max(1, EAGER_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
