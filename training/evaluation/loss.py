"""The mean loss, perplexity and bits per byte of a model on one dataset or several."""

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch

from common.console import note
from common.errors import InputError
from common.tokenizer import Lengths
from training.dataset.corpus import Samples
from training.evaluation.scoring import BATCH, perplexity, sum_of_losses
from training.model import GPT2, summed_loss

LONG = 10  # seconds: what takes longer says so first


@torch.no_grad()
def evaluate(model: GPT2, samples: Samples, byte_lengths: Lengths | None = None, share: float = 1.0) -> dict[str, Any]:
    """Mean loss (nats per token) and perplexity over all windows of `samples`, the short last one included.

    With a `share` below 1, over that share of the windows, evenly spaced, but at least one. Says its time beforehand.
    With the bytes of each token id (`Tokenizer.byte_lengths`) also the bits per byte of the predicted text, where
    end-of-text costs bits and has no bytes. They compare models of different vocabularies.
    """
    windows = samples.per_epoch
    count = min(windows, max(1, int(share * windows))) if share < 1 else windows
    numbers = [number * windows // count for number in range(count)]
    tail = samples.tail() if count == windows else np.empty(0, np.int64)
    predicted = count * samples.seq_len
    if count:
        _say_time(model, samples, predicted)
    total = sum_of_losses(model, samples, numbers, BATCH)
    if len(tail) > 1:
        device = next(model.parameters()).device
        tokens = torch.from_numpy(tail).to(device)[None]
        total += float(summed_loss(model.eval()(tokens[:, :-1]), tokens[:, 1:]))
        predicted += len(tail) - 1
    if not predicted:
        raise InputError(f"{samples.corpus.prefix}: fewer than two tokens to evaluate; choose another file or part")
    text = 0
    if byte_lengths is not None:
        text = sum(int(byte_lengths[tokens[1:]].sum()) for tokens in chain(map(samples.sample, numbers), [tail]))
    return _result(total, predicted, samples.tokens - 1, samples.documents, text)


def _say_time(model: GPT2, samples: Samples, tokens: int) -> None:
    """Say what evaluating `tokens` takes, by the second of two single windows, if that is long."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        sum_of_losses(model, samples, range(1), 1)
        seconds = (time.perf_counter() - began) * tokens / samples.seq_len
    if seconds > LONG:
        device = next(model.parameters()).device.type
        note(
            f"{samples.corpus.prefix}: {tokens:,} of {samples.tokens - 1:,} tokens take about "
            f"{timedelta(seconds=round(seconds))} on this {device.upper()}"
        )


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


def summary(result: dict[str, Any]) -> str:
    """A result in one line."""
    per_byte = f", {result['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in result else ""
    return (
        f"validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}{per_byte}, "
        f"{result['tokens']:,} of {result['available_tokens']:,} tokens in {result['documents']:,} documents"
    )
