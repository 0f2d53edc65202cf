"""The loss of one unsharded model over samples: its mean, perplexity, bits per byte."""

import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from common.progress import Meter
from common.tokenizer import Lengths
from common.workers import batched, threaded_map
from training.dataset.batches import BatchForm, make_batch, read_batch
from training.dataset.corpus import Samples
from training.loss import IGNORED
from training.model import GPT2, summed_loss

BATCH = 8  # windows per forward pass


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that exceeds a float."""
    return math.inf if loss >= 700 else math.exp(loss)


@torch.no_grad()
def evaluate(
    model: GPT2,
    samples: Samples,
    byte_lengths: Lengths | None = None,
    share: float = 1.0,
    batch_size: int = BATCH,
    form: BatchForm | None = None,
) -> dict[str, Any] | None:
    """Loss (mean nats per token) and perplexity over all windows, the short last one included.

    None if they have no targets: all their documents have been removed, or there are fewer than two
    tokens. `form` has the rules for positions and masked targets (default: none). A `share` below 1
    takes that share of the windows, evenly spaced, but at least one. `byte_lengths`, the bytes of
    each token id, adds the bits per byte of the predicted text, where end-of-text costs bits and
    has no bytes: they compare models of different vocabularies.
    """
    windows = samples.per_epoch
    count = min(windows, max(1, int(share * windows))) if share < 1 else windows
    numbers = [number * windows // count for number in range(count)]
    tail = samples.tail() if count == windows else np.empty(0, np.int64)
    form = form or BatchForm(samples.corpus.end_of_text)
    last = [make_batch(tail[None], form)] if len(tail) > 1 else []
    device = next(model.parameters()).device
    total, predicted, text = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    read = partial(read_batch, samples, form)
    with (
        Meter("evaluate", "windows", count + len(last)) as meter,
        closing(threaded_map(read, batched(numbers, batch_size), 1)) as batches,
    ):
        for batch in chain(batches, last):
            tokens, targets, positions, ends, counted = batch.to(device)
            total += summed_loss(model.eval()(tokens, positions, ends), targets).double()
            predicted += counted
            if byte_lengths is not None:
                text += int(byte_lengths[batch.targets[batch.targets != IGNORED].numpy()].sum())
            meter.advance(len(tokens))
    if not predicted:
        return None
    return _result(float(total), predicted, samples.tokens - 1, samples.documents, text)


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result over several datasets, in which every token has the same weight."""
    total = sum(result["loss"] * result["tokens"] for result in results)
    counts = ("tokens", "available_tokens", "documents", "bytes")
    return _result(total, *(sum(result.get(key, 0) for result in results) for key in counts))


def _result(total: float, tokens: int, available: int, documents: int, text: int) -> dict[str, Any]:
    loss = total / tokens
    per_byte = {"bits_per_byte": total / math.log(2) / text, "bytes": text} if text else {}
    counts = {"tokens": tokens, "available_tokens": available, "documents": documents}
    return {"loss": loss, "perplexity": perplexity(loss), **per_byte, **counts}


def summary(result: dict[str, Any], part: str = "all") -> str:
    """A result on a part of the documents in one line."""
    loss = {"train": "training loss", "valid": "validation loss", "test": "test loss"}.get(part, "loss")
    per_byte = f", {result['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in result else ""
    return (
        f"{loss} {result['loss']:.4f}, perplexity {result['perplexity']:.2f}{per_byte}, "
        f"{result['tokens']:,} of {result['available_tokens']:,} tokens in {result['documents']:,} documents"
    )
