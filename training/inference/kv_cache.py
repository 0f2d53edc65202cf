"""Keys and values kept from one token to the next, so that a pass computes the new token alone.

    with kv_cache(model, rows=2, length=256) as next_logits:
        logits = next_logits([[50256, 464], [50256, 15496, 11]])           # both texts, in one pass
        logits = next_logits([[50256, 464, 1351], [50256, 15496, 11, 314]])  # their last tokens, in another

The model file knows nothing of it: every layer's attention is replaced from outside, and restored at the end.
Shapes as in `training.model`; S is the positions that the cache has room for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from training.model import GPT2, AttentionCore

NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]
"""Texts so far, B of them -> (B, V) logits of the token behind each."""


@contextmanager
def kv_cache(model: GPT2, rows: int, length: int) -> Iterator[NextLogits]:
    """Yield `next_logits` for `rows` texts of any lengths, which grow by at most a token a call.

    `length` is the longest that a text is to become; room is made for it, or for seq_len positions if that is less.
    The texts of a batch are padded on the right, where causal attention never looks, and a token behind a text
    takes the place of its padding: every row has its own positions from 0, and the logits it has alone (but for
    rounding). A text longer than seq_len is seen through a window of its last seq_len tokens. Each token moves the
    window, and with it the position of every token in it: what was kept is worth nothing, and all texts are computed
    anew. Without dropout, without gradients.
    """
    settings, weight = model.settings, model.wte.weight
    room = min(length, settings.seq_len)
    shape = (rows, settings.n_head, room, settings.n_embd // settings.n_head)
    row = torch.arange(rows, device=weight.device)[:, None]  # (B, 1)
    places = row.new_empty(0)  # (B, T) positions of the tokens of this pass
    visible = places  # (B, 1, T, S) whether a token may look at a position, S the positions in use
    begun = False

    def attend(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, nh, T, hs) three times -> (B, nh, T, hs)."""
        keys[row, :, places] = k.transpose(1, 2)  # (B, nh, T, hs) -> (B, T, nh, hs)
        values[row, :, places] = v.transpose(1, 2)
        used = visible.shape[-1]
        return F.scaled_dot_product_attention(q, keys[:, :, :used], values[:, :, :used], attn_mask=visible)

    def next_logits(texts: Sequence[Sequence[int]]) -> Tensor:
        nonlocal places, visible, begun
        windows = [text[-settings.seq_len :] for text in texts]
        whole = not begun or any(len(text) > settings.seq_len for text in texts)
        begun = True
        fresh = [torch.tensor(window if whole else window[-1:]) for window in windows]
        tokens = pad_sequence(fresh, batch_first=True).to(row.device)  # (B, T)
        starts = [len(window) - len(part) for window, part in zip(windows, fresh, strict=True)]
        places = torch.tensor(starts, device=row.device)[:, None] + torch.arange(tokens.shape[1], device=row.device)
        used = torch.arange(max(map(len, windows)), device=row.device)
        visible = (used <= places[..., None])[:, None]
        x = model.blocks(model.embed(tokens, places))
        last = torch.tensor([[len(part) - 1] for part in fresh], device=row.device)
        logits: Tensor = model.logits(x[row, last])[:, 0]  # (B, T, C) -> (B, 1, C): the head is most of the work
        return logits

    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    model.eval()
    with torch.inference_mode():
        for core in cores:
            # zeros, since a weight of 0 does not silence what happens to be NaN
            keys, values = weight.new_zeros(shape), weight.new_zeros(shape)
            setattr(core, "forward", partial(attend, keys, values))  # noqa: B010
        try:
            yield next_logits
        finally:
            for core in cores:
                delattr(core, "forward")
