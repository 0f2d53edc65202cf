"""Dropout's random numbers: a pure function of (seed, iteration, rank), equal after a resume.

Under tensor parallelism each process has two streams. The main one is equal on all ranks of a
tensor-parallel group, because they compute the same activations. Attention is split over the ranks,
and each rank drops other weights: its stream depends on its rank and on the state of the main
stream, so that a recomputed layer draws the same numbers again. Under sequence parallelism all
activations are split, and the main stream itself differs between the ranks.

The rank's stream is wrapped in custom ops, so torch.compile does not break the graph.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from common.seeds import derive_seed
from training.kernels.documents import document_mask
from training.model import Attention, AttentionCore

_STEP = 0x9E3779B97F4A7C15  # odd, so that different ranks have different seeds
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_aten = torch.ops.aten
FUSED: dict[str, Callable[[], bool]] = {
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
"""PyTorch's fused kernels, and whether each may be used, one per run. The first takes any type."""


class RandomStreams:
    """The random streams of one process: `attach` once, `start_iteration` before every step.

    The main stream depends on seed, iteration and `ranks`.
    """

    def __init__(self, seed: int, ranks: tuple[int, ...]) -> None:
        self.seed, self.ranks = seed, ranks
        # A compiled layer that recomputes would draw from generators seeded once per process, so a
        # resumed run would draw other masks. Without them it saves and restores the main stream.
        functorch_config.graphsafe_rng_functionalization = False

    def attach(self, model: nn.Module, tensor_rank: int) -> None:
        """Let the dropout of attention weights, alone in a split region, use this rank's stream.

        On a GPU they compute in the kernel that PyTorch may use now.
        """
        kernel = next((name for name, enabled in FUSED.items() if enabled()), "math")
        for attention in (module for module in model.modules() if isinstance(module, Attention)):
            if attention.core.dropout:
                attention.core = RankAttentionCore(attention.core.dropout, tensor_rank, kernel)

    def start_iteration(self, iteration: int) -> None:
        """Seed the main stream for one optimiser step."""
        torch.manual_seed(derive_seed(self.seed, iteration, *self.ranks))


class RankAttentionCore(AttentionCore):
    """Attention with dropout from the stream of a tensor-parallel rank."""

    def __init__(self, dropout: float, rank: int, kernel: str = "math") -> None:
        super().__init__(dropout)
        self.rank, self.kernel = rank, kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None = None) -> Tensor:
        """(B, nh, T, hs) three times, (B, K) -> (B, nh, T, hs)."""
        if not self.training:
            return super().forward(q, k, v, ends)
        if ends is None and q.is_cuda and self.kernel in FUSED and q.shape[-1] % 8 == 0:
            out: Tensor = rank_attention(q, k, v, self.dropout, self.rank, self.kernel)[0]
            return out
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, nh, T, T)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if ends is not None:
            visible = document_mask(ends, len(visible))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        kept = rank_uniform(weights, self.rank) >= self.dropout
        return torch.where(kept, weights / (1 - self.dropout), 0.0).to(v.dtype) @ v


@contextmanager
def _rank_stream(device: torch.device, rank: int) -> Iterator[None]:
    """Switch the device's generator to the stream of a tensor-parallel rank, and back."""
    shift = (rank + 1) * _STEP
    if device.type == "cuda":  # counter-based: same counter, other key
        generator = torch.cuda.default_generators[device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed((seed + shift) % 2**63).set_offset(offset)
        yield
        offset = generator.get_offset()
        generator.manual_seed(seed).set_offset(offset)
    else:
        seed = int(torch.randint(2**62, ()))
        main = torch.get_rng_state()
        torch.default_generator.manual_seed((seed + shift) % 2**63)
        yield
        torch.set_rng_state(main)


@torch.library.custom_op("gpt2::rank_uniform", mutates_args=(), tags=_DRAWS)
def rank_uniform(like: Tensor, rank: int) -> Tensor:
    """Numbers from [0, 1) of the rank's stream, float32, in the shape of `like`."""
    with _rank_stream(like.device, rank):
        return torch.rand(like.shape, device=like.device)


rank_uniform.register_fake(lambda like, rank: torch.empty(like.shape, device=like.device))


@torch.library.custom_op("gpt2::rank_attention", mutates_args=(), tags=_DRAWS)
def rank_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, rank: int, kernel: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention on a GPU in one of FUSED, with dropout from the rank's stream.

    (B, nh, T, hs) x 3 -> (B, nh, T, hs), and log-sum-exp, Philox seed and offset for the backward.
    """
    with _rank_stream(q.device, rank):
        out, log_sum_exp, seed, offset = _fused(q, k, v, dropout, kernel)
    return out, log_sum_exp, seed.clone(), offset.clone()


rank_attention.register_fake(lambda q, k, v, dropout, rank, kernel: _fused(q, k, v, dropout, kernel))
RANK_ATTENTION = torch.ops.gpt2.rank_attention.default  # the operation as recompute sees it


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A kernel's output, log-sum-exp, seed and offset."""
    options = (dropout, True) if kernel == "flash" else (None, True, dropout, True)
    outputs = getattr(_aten, f"_scaled_dot_product_{kernel}_attention")(q, k, v, *options)
    out, log_sum_exp, seed, offset = outputs if kernel == "efficient" else (*outputs[:2], *outputs[6:8])
    return out, log_sum_exp, seed, offset


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.dropout, _, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *output, seed, offset = ctx.saved_tensors
    p, T = ctx.dropout, gradient.shape[2]
    options = {
        "efficient": (q, k, v, None, *output, seed, offset, p, [True, True, True, False], True),
        "flash": (q, k, v, *output, None, None, T, T, p, True, seed, offset),
        "cudnn": (q, k, v, *output, seed, offset, None, None, None, T, T, p, True),
    }
    backward = getattr(_aten, f"_scaled_dot_product_{ctx.kernel}_attention_backward")
    return (*backward(gradient, *options[ctx.kernel])[:3], None, None, None)


rank_attention.register_autograd(_backward, setup_context=_save)
