"""Dropout's random numbers: a pure function of (seed, iteration, rank), so that a resumed run draws the same masks.

Under tensor parallelism each process has two streams. The main one is equal on all ranks of a tensor-parallel group,
because they compute the same activations. Attention is split over the ranks, and each rank drops other weights: its
stream depends on its rank and on the state of the main stream, so that a recomputed layer draws the same numbers again.
Under sequence parallelism all activations are split, and the main stream itself differs between the ranks.

The rank's stream is used inside operations of their own, which torch.compile keeps whole: a graph has no break there.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.seeds import derive_seed
from training.model import Attention, AttentionCore

_STEP = 0x9E3779B97F4A7C15  # odd, so that different ranks have different seeds
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_aten = torch.ops.aten


class RandomStreams:
    """The random streams of one process; call `attach` once and `start_iteration` before every step.

    The main stream depends on seed, iteration and `ranks`.
    """

    def __init__(self, seed: int, ranks: tuple[int, ...]) -> None:
        self.seed, self.ranks = seed, ranks

    def attach(self, model: nn.Module, tensor_rank: int) -> None:
        """Let the dropout of attention weights, the only one inside a split region, draw this rank's numbers."""
        for attention in (module for module in model.modules() if isinstance(module, Attention)):
            if attention.core.dropout:
                attention.core = RankAttentionCore(attention.core.dropout, tensor_rank)

    def start_iteration(self, iteration: int) -> None:
        """Seed the main stream for one optimiser step."""
        torch.manual_seed(derive_seed(self.seed, iteration, *self.ranks))


class RankAttentionCore(AttentionCore):
    """Attention with dropout from the stream of a tensor-parallel rank."""

    def __init__(self, dropout: float, rank: int) -> None:
        super().__init__(dropout)
        self.rank = rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, nh, T, hs) three times -> (B, nh, T, hs)."""
        if not self.training:
            return super().forward(q, k, v)
        if q.is_cuda and q.shape[-1] % 8 == 0:
            out: Tensor = rank_attention(q, k, v, self.dropout, self.rank)[0]
            return out
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, nh, T, T)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        kept = rank_uniform(weights, self.rank) >= self.dropout
        return torch.where(kept, weights / (1 - self.dropout), 0.0).to(v.dtype) @ v


@contextmanager
def _rank_stream(device: torch.device, rank: int) -> Iterator[None]:
    """Switch the device's generator to the stream of a tensor-parallel rank, and back to where all ranks are."""
    if device.type == "cuda":  # counter-based: same counter, other key
        generator = torch.cuda.default_generators[device.index or 0]
        seed = generator.initial_seed()
        offset = generator.get_offset()
        generator.manual_seed(_rank_seed(seed, rank))
        generator.set_offset(offset)
        yield
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)
        return
    generator = torch.default_generator
    seed = int(torch.randint(2**62, ()))
    main = generator.get_state()
    generator.manual_seed(_rank_seed(seed, rank))
    yield
    generator.set_state(main)


def _rank_seed(seed: int, rank: int) -> int:
    return (seed + (rank + 1) * _STEP) % 2**63


@torch.library.custom_op("gpt2::rank_uniform", mutates_args=(), tags=_DRAWS)
def rank_uniform(like: Tensor, rank: int) -> Tensor:
    """Numbers from [0, 1) of the rank's stream, float32, in the shape of `like`."""
    with _rank_stream(like.device, rank):
        return torch.rand(like.shape, device=like.device)


@rank_uniform.register_fake
def _(like: Tensor, rank: int) -> Tensor:
    return torch.empty(like.shape, device=like.device)


@torch.library.custom_op("gpt2::rank_attention", mutates_args=(), tags=_DRAWS)
def rank_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention on a GPU with dropout from the rank's stream.

    (B, nh, T, hs) three times -> (B, nh, T, hs), and what the backward pass needs: log-sum-exp, Philox seed and offset.
    """
    with _rank_stream(q.device, rank):
        found = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, True)
    out, *state = found
    return (out, *(tensor.clone() for tensor in state))


@rank_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, dropout: float, rank: int) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, True)
    return found


@torch.library.custom_op("gpt2::rank_attention_backward", mutates_args=())
def rank_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    found = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, None, out, log_sum_exp, seed, offset, dropout, [True, True, True, False], True
    )
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@rank_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.dropout, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
    gradients = rank_attention_backward(gradient, *ctx.saved_tensors, ctx.dropout)
    return (*gradients, None, None)


rank_attention.register_autograd(_backward, setup_context=_save)
