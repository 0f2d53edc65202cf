"""Cache keys and values between tokens, so that a forward pass computes only the new token.

    with kv_cache(model, rows=2, length=256) as next_logits:
        next_logits({0: [50256, 464], 1: [50256, 15496, 11]})  # computes both texts, returns logits
        next_logits({0: [50256, 464, 1351], 1: [50256, 15496, 11, 314]})  # computes the last tokens
        next_logits({1: [50256, 15496, 11, 314, 716]})         # text 0 has ended

The model is unaware of the cache: each layer's attention is replaced from outside, then restored.
Shapes are those of `training.model`; S is the number of positions in use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from training.kernels.ops import packed_weights
from training.model import GPT2, AttentionCore

NextLogits = Callable[[Mapping[int, Sequence[int]]], Tensor]
"""B texts by number, as tokens -> (B, V) logits of each text's next token, in the same order."""


@contextmanager
def kv_cache(model: GPT2, rows: int, length: int) -> Iterator[NextLogits]:
    """Yield `next_logits` for `rows` texts of any length; each call adds one token per text.

    A text that is not given has ended: its row leaves the cache. The cache has room for `length`
    tokens per text, the longest that a text will get, or for seq_len if that is less. Texts are
    padded on the right, which causal attention ignores, and a new token overwrites the padding:
    every row has its own positions from 0, and, up to rounding, the logits that it has alone. Of a
    longer text than seq_len only the last seq_len tokens are used. Each token shifts that window,
    so the cache is invalid and every text is recomputed. Dropout and gradients are off.
    """
    settings, weight = model.settings, model.wte.weight
    room = min(length, settings.seq_len)
    shape = (rows, settings.n_head, room, settings.n_embd // settings.n_head)
    row = torch.arange(rows, device=weight.device)[:, None]  # (B, 1)
    positions = row.new_empty(0)  # (B, T) of the tokens in this pass
    visible = positions  # (B, 1, T, S) attention mask, True where a token may attend
    growing: list[int] = []  # numbers of the texts in the cache

    def attend(cache: list[Tensor], q: Tensor, k: Tensor, v: Tensor, _ends: None) -> Tensor:
        """(B, nh, T, hs) three times -> (B, nh, T, hs)."""
        keys, values = cache
        keys[row, :, positions] = k.transpose(1, 2)  # (B, nh, T, hs) -> (B, T, nh, hs)
        values[row, :, positions] = v.transpose(1, 2)
        used = visible.shape[-1]
        return F.scaled_dot_product_attention(q, keys[:, :, :used], values[:, :, :used], attn_mask=visible)

    def next_logits(texts: Mapping[int, Sequence[int]]) -> Tensor:
        nonlocal row, positions, visible, growing
        if len(texts) < len(growing):
            kept = torch.tensor([growing.index(number) for number in texts], device=row.device)
            for cache in caches:
                cache[:] = [part[kept] for part in cache]
            row = row[: len(kept)]
        windows = [text[-settings.seq_len :] for text in texts.values()]
        recompute = not growing or any(len(text) > settings.seq_len for text in texts.values())
        growing = list(texts)
        new = [torch.tensor(window if recompute else window[-1:]) for window in windows]
        tokens = pad_sequence(new, batch_first=True).to(row.device)  # (B, T)
        starts = [len(window) - len(part) for window, part in zip(windows, new, strict=True)]
        positions = torch.tensor(starts, device=row.device)[:, None] + torch.arange(tokens.shape[1], device=row.device)
        used = torch.arange(max(map(len, windows)), device=row.device)
        visible = (used <= positions[..., None])[:, None]
        x = model.blocks(model.embed(tokens, positions))
        last = torch.tensor([[len(part) - 1] for part in new], device=row.device)
        logits: Tensor = model.logits(x[row, last])[:, 0]  # (B, T, C) -> (B, 1, C): the head is expensive
        return logits

    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    model.eval()
    with torch.inference_mode(), packed_weights(model, rows):
        # zeros: attention weights of 0 do not cancel a NaN in uninitialised memory
        caches = [[weight.new_zeros(shape), weight.new_zeros(shape)] for _ in cores]
        for core, cache in zip(cores, caches, strict=True):
            setattr(core, "forward", partial(attend, cache))  # noqa: B010
        try:
            yield next_logits
        finally:
            for core in cores:
                delattr(core, "forward")
