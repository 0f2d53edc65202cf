"""The mean loss, perplexity and bits per byte of a model on one dataset or several."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from common.errors import InputError
from common.tokenizer import Lengths
from training.dataset.corpus import Samples
from training.evaluation.scoring import BATCH, perplexity, sum_of_losses
from training.model import GPT2, summed_loss


@torch.no_grad()
def evaluate(model: GPT2, samples: Samples, byte_lengths: Lengths | None = None) -> dict[str, Any]:
    """Mean loss (nats per token) and perplexity over all windows of `samples`, the short last one included.

    With the bytes of each token id (`Tokenizer.byte_lengths`) also the bits per byte of the predicted text, where
    end-of-text costs bits and has no bytes. They compare models of different vocabularies.
    """
    tail = samples.tail()
    predicted = samples.per_epoch * samples.seq_len
    total = sum_of_losses(model, samples, samples.per_epoch, BATCH)
    if len(tail) > 1:
        device = next(model.parameters()).device
        tokens = torch.from_numpy(tail).to(device)[None]
        total += float(summed_loss(model.eval()(tokens[:, :-1]), tokens[:, 1:]))
        predicted += len(tail) - 1
    if not predicted:
        raise InputError(f"{samples.corpus.prefix}: fewer than two tokens to evaluate; choose another file or part")
    text = 0
    if byte_lengths is not None:
        windows = (samples.sample(number) for number in range(samples.per_epoch))
        text = sum(int(byte_lengths[tokens[1:]].sum()) for tokens in chain(windows, [tail]))
    return _result(total, predicted, samples.documents, text)


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result over several datasets, in which every token has the same weight."""
    total = sum(result["loss"] * result["tokens"] for result in results)
    counts = (sum(result.get(key, 0) for result in results) for key in ("tokens", "documents", "bytes"))
    return _result(total, *counts)


def _result(total: float, tokens: int, documents: int, text: int) -> dict[str, Any]:
    loss = total / tokens
    per_byte = {"bits_per_byte": total / math.log(2) / text, "bytes": text} if text else {}
    return {"loss": loss, "perplexity": perplexity(loss), **per_byte, "tokens": tokens, "documents": documents}


def summary(result: dict[str, Any]) -> str:
    """A result in one line."""
    per_byte = f", {result['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in result else ""
    return (
        f"validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}{per_byte}, "
        f"{result['tokens']:,} tokens in {result['documents']:,} documents"
    )
