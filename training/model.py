"""GPT-2 in one file, written for one device; `training.parallel` spreads it over many without touching it.

The network of Radford et al. 2019 (pre-norm blocks, learned positions, tied head), with parameter names as Hugging
Face has them (`wte`, `wpe`, `h.0.ln_1`, `h.0.attn.c_attn`, …). Two layouts are our own:

- c_attn's rows are ordered [head, (q, k, v), dim], so that a column split never cuts a head;
- wte may carry padding rows behind the true vocabulary: zero, never looked up, and -inf before the softmax.

Shapes: B samples, T tokens, C channels (n_embd), nh heads, hs head size, V vocabulary rows.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.settings import ModelSettings

IGNORED = -100  # as a target: no loss there (cross_entropy's own default)
INIT_STD = 0.02  # of every matrix; the two projections into the residual stream get INIT_STD / sqrt(2 * n_layer)


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows rounded up so that every tensor-parallel rank holds a multiple of 128 of them."""
    multiple = 128 * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def parameter_count(settings: ModelSettings, vocab_rows: int | None = None) -> int:
    """Parameters of the model with `vocab_rows` rows of embedding (default: the true vocabulary)."""
    with torch.device("meta"):
        model = GPT2(settings.model_copy(update={"n_layer": 1}), vocab_rows)  # one layer stands for all: they are alike
    layer = sum(parameter.numel() for parameter in model.h.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) + (settings.n_layer - 1) * layer


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(hs)) v with a causal mask and dropout on the weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, nh, T, hs) three times -> (B, nh, T, hs)."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention over however many heads its c_attn holds."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_size = settings.n_embd // settings.n_head
        self.c_attn = nn.Linear(settings.n_embd, 3 * settings.n_embd)
        self.core = AttentionCore(settings.dropout)
        self.c_proj = nn.Linear(settings.n_embd, settings.n_embd)
        self.drop = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        qkv = self.c_attn(x)  # (B, T, C) -> (B, T, 3C); T is its own: x may be a slice of the sequence
        batch, tokens, _ = qkv.shape
        qkv = qkv.view(batch, tokens, -1, 3, self.head_size)  # (B, T, nh, 3, hs)
        q, k, v = qkv.transpose(1, 2).unbind(dim=3)  # (B, nh, T, 3, hs) -> three of (B, nh, T, hs)
        y = self.core(q, k, v).transpose(1, 2).reshape(batch, tokens, -1)  # (B, nh, T, hs) -> (B, T, nh * hs)
        out: Tensor = self.drop(self.c_proj(y))
        return out


class MLP(nn.Module):
    """Four times wider, GELU in its tanh form, and back."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.c_fc = nn.Linear(settings.n_embd, 4 * settings.n_embd)
        self.c_proj = nn.Linear(4 * settings.n_embd, settings.n_embd)
        self.drop = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        out: Tensor = self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(settings.n_embd)  # PyTorch's default eps is GPT-2's: 1e-5
        self.attn = Attention(settings)
        self.ln_2 = nn.LayerNorm(settings.n_embd)
        self.mlp = MLP(settings)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Head(nn.Module):
    """Logits from the embedding's own rows (the tie): the weight is an argument, so there is only one of it."""

    vocab_bias: Tensor
    """(V,) 0 for true rows, -inf for padding: no padding row ever reaches a softmax."""

    def __init__(self, vocab_rows: int) -> None:
        super().__init__()
        self.register_buffer("vocab_bias", torch.zeros(vocab_rows), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, C), (V, C) -> (B, T, V)."""
        return F.linear(x, weight, self.vocab_bias)


class GPT2(nn.Module):
    """The whole network; `vocab_rows` >= vocab_size adds padding rows for a parallel layout."""

    def __init__(self, settings: ModelSettings, vocab_rows: int | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.vocab_rows = vocab_rows or settings.vocab_size
        self.wte = nn.Embedding(self.vocab_rows, settings.n_embd)
        self.wpe = nn.Embedding(settings.seq_len, settings.n_embd)
        self.drop = nn.Dropout(settings.dropout)
        self.h = nn.ModuleDict({str(layer): Block(settings) for layer in range(settings.n_layer)})
        self.ln_f = nn.LayerNorm(settings.n_embd)
        self.head = Head(self.vocab_rows)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, T) token ids, (B, T) positions (default: 0 to T - 1) -> (B, T, C)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))  # (B, T, C) + (T, C) or (B, T, C)
        return x

    def blocks(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        for block in self.h.values():
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        logits: Tensor = self.head(self.ln_f(x), self.wte.weight)
        return logits

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, T) token ids, (B, T) positions (default: 0 to T - 1) -> (B, T, V) logits."""
        return self.logits(self.blocks(self.embed(tokens, positions)))


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, float32, summed over the targets that are not IGNORED: (B, T, V), (B, T) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def initial_value(name: str, shape: torch.Size, settings: ModelSettings, seed: int) -> Tensor:
    """One parameter's initial value, shape `shape` without padding rows: a pure function of (name, shape, seed).

    Each parameter has a generator of its own, so that the values do not depend on the layout, nor on which of the
    parameters a process builds. GPT-2's recipe: N(0, 0.02), residual projections scaled down by sqrt(2 * n_layer),
    biases 0, LayerNorm weights 1.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    scale = 1 / math.sqrt(2 * settings.n_layer) if name.endswith("c_proj.weight") else 1.0
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    return torch.empty(shape).normal_(0.0, INIT_STD * scale, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    """63 bits that differ for every name and seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
