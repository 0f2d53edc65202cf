"""Sum the loss of one unsharded model over samples or over overlapping windows."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.progress import Meter
from common.workers import batched, threaded_map
from training.dataset.batches import BatchForm, Readable, read_batch
from training.model import GPT2, summed_loss

BATCH = 8  # windows per forward pass


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that exceeds a float."""
    return math.inf if loss >= 700 else math.exp(loss)


@torch.no_grad()
def sum_of_losses(model: GPT2, samples: Readable, numbers: Sequence[int], batch_size: int) -> float:
    """Loss in nats summed over all tokens of the samples with these numbers."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    read = partial(read_batch, samples, BatchForm(end_of_text=-1))
    with (
        Meter("evaluate", "windows", len(numbers)) as meter,
        closing(threaded_map(read, batched(numbers, batch_size), 1)) as batches,
    ):
        for batch in batches:
            tokens, targets = batch.tokens.to(device), batch.targets.to(device)
            total += summed_loss(model(tokens), targets).double()
            meter.advance(len(tokens))
    return float(total)


class Window(NamedTuple):
    """Tokens [begin, end) are the input; the last `scored` of tokens [begin + 1, end + 1) are predicted and count."""

    begin: int
    end: int
    scored: int


def sliding_windows(tokens: int, seq_len: int, stride: int) -> Iterator[Window]:
    """Windows that begin at multiples of `stride` (at most seq_len); each scores the tokens after the previous window.

    Every token but the first is scored once, after the first window with a context of at least seq_len - stride tokens.
    """
    begin, end = 0, min(seq_len, tokens - 1)
    yield Window(begin, end, end)
    while end < tokens - 1:
        begin, reached = begin + stride, end
        end = min(begin + seq_len, tokens - 1)
        yield Window(begin, end, end - reached)


@torch.no_grad()
def sum_of_sliding_losses(model: GPT2, tokens: npt.NDArray[np.integer], stride: int) -> float:
    """Loss in nats summed over all tokens but the first, with overlapping windows."""
    device = next(model.parameters()).device
    stream = torch.from_numpy(tokens.astype(np.int64)).to(device)
    windows = list(sliding_windows(len(tokens), model.settings.seq_len, stride))
    total = torch.zeros((), dtype=torch.float64, device=device)
    with Meter("evaluate", "windows", len(windows)) as meter:
        for (length, scored), group in groupby(windows, lambda window: (window.end - window.begin, window.scored)):
            position = torch.arange(length, device=device)
            for batch in batched(group, BATCH):
                inputs = torch.stack([stream[window.begin : window.end] for window in batch])
                targets = torch.cat([stream[window.end + 1 - scored : window.end + 1] for window in batch])
                logits = logits_at(model, inputs, (position >= length - scored).expand_as(inputs))
                total += summed_loss(logits[None], targets[None]).double()
                meter.advance(len(batch))
    return float(total)


def logits_at(model: GPT2, tokens: Tensor, selected: Tensor) -> Tensor:
    """(B, T) token ids, (B, T) bool -> (n, V) float32 logits at the n selected positions, in row order.

    The blocks run in the model's `dtype`, the head in float32: in bfloat16 the top logits would tie.
    """
    x = model.eval().blocks(model.embed(tokens))  # (B, T, C)
    return model.logits(x[selected].float())
