"""Attention within documents (Megatron-LM's `reset_attention_mask`), without a mask if faster.

    ends = document_ends(tokens, end_of_text)  # (B, T) -> (B, K)
    y = document_attention(q, k, v, p, ends)

A sample's documents end after each end-of-text, and the last one with the sample. `ends` has their
ends; samples with fewer documents repeat T, which adds documents without tokens. K is a power of
two, so that graphs have few shapes.
"""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

_MOST_CALLS = 8  # documents per sample up to which CPUs attend to one after the other


def document_ends(tokens: npt.NDArray[np.int64], end_of_text: int) -> Tensor:
    """(B, T) tokens -> (B, K) int64: the index after the last token of each document, then T."""
    rows = [np.flatnonzero(row[:-1] == end_of_text) + 1 for row in tokens]
    most = max(map(len, rows)) + 1
    ends = np.full((len(rows), 1 << (most - 1).bit_length()), tokens.shape[1])
    for row, edges in zip(ends, rows, strict=True):
        row[: len(edges)] = edges
    return torch.from_numpy(ends)


def concatenated(ends: list[Tensor]) -> Tensor:
    """(B, K) of several micro-batches, with any K -> (B', K')."""
    widest = max(each.shape[1] for each in ends)
    return torch.cat([F.pad(each, (0, widest - each.shape[1]), mode="replicate") for each in ends])


def document_mask(ends: Tensor, length: int) -> Tensor:
    """(B, K) -> (B, 1, T, T): True where a token attends, to itself and earlier in its document."""
    position = torch.arange(length, device=ends.device)
    document = (position.unsqueeze(1) >= ends.unsqueeze(1)).sum(2)  # (T, 1), (B, 1, K) -> (B, T)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & (position.unsqueeze(1) >= position)).unsqueeze(1)


def document_attention(q: Tensor, k: Tensor, v: Tensor, p: float, ends: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v within documents: (B, nh, T, hs) x 3, (B, K) -> (B, nh, T, hs).

    GPUs take FlashAttention, which has neither dropout nor float32. CPUs take a few documents one
    after the other. Everything else is PyTorch's attention with a mask.
    """
    T, hs = q.shape[2:]
    if q.is_cuda and not p and q.dtype != torch.float32 and hs % 8 == 0:
        return _packed(q, k, v, ends)
    if q.device.type == "cpu" and ends.shape[1] <= _MOST_CALLS and not torch.compiler.is_compiling():
        samples = zip(torch.split(q, 1), torch.split(k, 1), torch.split(v, 1), ends.tolist(), strict=True)
        return torch.cat([_one_by_one(q, k, v, p, edges) for q, k, v, edges in samples])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(ends, T), dropout_p=p)


def _packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """All documents of all samples in one call."""
    B, _, T, _ = q.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))  # (B, nh, T, hs) -> (B * T, nh, hs)
    first = torch.arange(0, B * T, T, device=ends.device).unsqueeze(1)
    edges = F.pad((ends + first).flatten(), (1, 0)).to(torch.int32)  # (B * K + 1,)
    y = cast(Tensor, varlen_attn(q, k, v, edges, edges, T, T, window_size=(-1, 0)))
    return y.view(B, T, *y.shape[1:]).transpose(1, 2)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, p: float, ends: list[int]) -> Tensor:
    """One sample: (1, nh, T, hs) three times -> the same. In 3-D, PyTorch would keep all scores."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]
    parts = zip(*(torch.split(each, sizes, dim=2) for each in (q, k, v)), strict=True)
    made = [F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True) for q, k, v in parts]
    return torch.cat(made, dim=2)
