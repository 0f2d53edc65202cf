"""GPT-2 in one file, for one device; `training.parallel` applies every layout from outside.

The network of Radford et al. 2019 (pre-norm blocks, learned positions, tied head), with Hugging
Face's parameter names (`wte`, `wpe`, `h.0.ln_1`, `h.0.attn.c_attn`, …). One layout is ours:
c_attn's rows are ordered [head, (q, k, v), dim], so that a split of the rows never cuts a head.

Parameters are float32. The embedding rounds to `GPT2.dtype`, and every layer computes in the type
of its input. Weights are cast where they are used, unless `rounded` is a copy of that type.

B samples, T tokens, C channels (n_embd), nh heads, hs head size, V vocabulary, K documents/sample.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.seeds import derive_seed
from common.settings import ModelSettings
from training.kernels import ops
from training.kernels.ops import Heads
from training.loss import IGNORED
from training.tensors import leaf_of

INIT_STD = 0.02  # of every matrix; the two projections into the residual stream get INIT_STD / sqrt(2 * n_layer)


class Module(nn.Module):
    """A module that returns a tensor; nn.Module declares Any."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear, Module):
    """A matrix product in the type of its input."""

    rounded: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("rounded", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return ops.linear(x, self.weight, self.bias, self.rounded)


class LayerNorm(nn.LayerNorm):
    """Normalisation in its input's type, with float32 statistics; the default eps is GPT-2's."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) -> (…, C)."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class GeluLinear(Linear):
    """A matrix product and GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return ops.linear_gelu(x, self.weight, self.bias, self.rounded)


class HeadsLinear(Linear):
    """The matrix product whose columns are ordered [head, (q, k, v), dim]."""

    __call__: Callable[..., Heads]  # type: ignore[assignment]

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__(width, 3 * width)
        self.head_size = head_size

    def forward(self, x: Tensor) -> Heads:  # type: ignore[override]
        """(B, T, C) -> q, k and v, (B, nh, T, hs) each."""
        return ops.linear_heads(x, self.weight, self.bias, self.head_size, self.rounded)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(hs)) v, causal or within documents, with dropout on the weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None = None) -> Tensor:
        """(B, nh, T, hs) three times, (B, K) -> (B, nh, T, hs)."""
        return ops.attention(q, k, v, self.dropout if self.training else 0.0, ends)


class Attention(nn.Module):
    """Causal self-attention over the heads that c_attn holds."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.c_attn = HeadsLinear(settings.n_embd, settings.n_embd // settings.n_head)
        self.core = AttentionCore(settings.dropout)
        self.c_proj = Linear(settings.n_embd, settings.n_embd)

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """(B, T, C), (B, K) -> (B, T, C)."""
        y = self.core(*self.c_attn(x), ends)  # (B, T, C) -> three of (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, nh, T, hs) -> (B, T, nh, hs) -> (B, T, C)
        return self.c_proj(y)


class MLP(Module):
    """Four times wider, GELU, and back."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.c_fc = GeluLinear(settings.n_embd, 4 * settings.n_embd)
        self.c_proj = Linear(4 * settings.n_embd, settings.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 4C) -> (B, T, C)."""
        return self.c_proj(self.c_fc(x))


class Block(Module):
    """One pre-norm transformer layer."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(settings.n_embd)
        self.attn = Attention(settings)
        self.ln_2 = LayerNorm(settings.n_embd)
        self.mlp = MLP(settings)
        self.drop = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """(B, T, C), (B, K) -> (B, T, C)."""
        x = x + self.drop(self.attn(self.ln_1(x), ends))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x


class Head(Module):
    """Logits; the weight is an argument because it is the token embedding's (tied)."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, C), (V, C) -> (B, T, V)."""
        return ops.linear(x, weight, None)


class GPT2(nn.Module):
    """The whole network; it computes in `dtype`."""

    def __init__(self, settings: ModelSettings, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.settings, self.dtype = settings, dtype
        self.wte = nn.Embedding(settings.vocab_size, settings.n_embd)
        self.wpe = nn.Embedding(settings.seq_len, settings.n_embd)
        self.h = nn.ModuleDict({str(layer): Block(settings) for layer in range(settings.n_layer)})
        self.ln_f = LayerNorm(settings.n_embd)
        self.head = Head()

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, T) token ids, (B, T) positions (default: 0 to T - 1) -> (B, T, C)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = (self.wte(tokens) + self.wpe(positions)).to(self.dtype)  # (B, T, C) + (T, C) or (B, T, C)
        return F.dropout(x, self.settings.dropout, self.training)

    def blocks(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """(B, T, C), (B, K) -> (B, T, C)."""
        for block in self.h.values():
            x = block(x, ends)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        return self.head(self.ln_f(x), self.wte.weight)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """(B, T) token ids, (B, T) positions (default: 0 to T - 1) -> (B, T, V) logits.

        With the `ends` of documents, (B, K), tokens attend within their document.
        """
        return self.logits(self.blocks(self.embed(tokens, positions), ends))


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats over unignored targets: (B, T, V), (B, T) -> float32, ()."""
    # (B, T, V), (B, T) -> (B * T, V), (B * T,)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def initial_value(name: str, shape: torch.Size, settings: ModelSettings, seed: int) -> Tensor:
    """The initial value of one parameter: a pure function of its name, its shape and the seed.

    Each parameter has its own generator, so that its value depends neither on the layout nor on
    which other parameters a process builds. GPT-2's recipe: N(0, 0.02), residual projections scaled
    down by sqrt(2 * n_layer), biases 0, LayerNorm weights 1.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    leaf = leaf_of(name)
    if leaf.module.kind == "norm":
        return torch.ones(shape)
    scale = 1 / math.sqrt(2 * settings.n_layer) if leaf.split == 1 else 1.0
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(shape).normal_(0.0, INIT_STD * scale, generator=generator)
