"""The mean loss and perplexity of a model on one dataset or several."""

from collections.abc import Sequence
from typing import Any

import torch

from common.errors import InputError
from training.dataset.corpus import Samples
from training.evaluation.scoring import BATCH, perplexity, sum_of_losses
from training.model import GPT2, summed_loss


@torch.no_grad()
def evaluate(model: GPT2, samples: Samples) -> dict[str, Any]:
    """Mean loss (nats per token) and perplexity over all windows of `samples`, the short last one included."""
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
    return _result(total, predicted, samples.documents)


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result over several datasets, in which every token has the same weight."""
    total = sum(result["loss"] * result["tokens"] for result in results)
    return _result(total, sum(result["tokens"] for result in results), sum(result["documents"] for result in results))


def _result(total: float, tokens: int, documents: int) -> dict[str, Any]:
    loss = total / tokens
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens, "documents": documents}


def summary(result: dict[str, Any]) -> str:
    """A result in one line."""
    return (
        f"validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        f"{result['tokens']:,} tokens in {result['documents']:,} documents"
    )
