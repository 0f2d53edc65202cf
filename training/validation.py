"""The loss of one whole model over samples in order: `training.evaluate`'s."""

from contextlib import closing
from functools import partial

import torch

from common.workers import threaded_map
from training.batches import BatchForm, Readable, read_batch
from training.model import GPT2, summed_loss
from training.precision import autocast


@torch.no_grad()
def sum_of_losses(model: GPT2, samples: Readable, count: int, batch_size: int, precision: str) -> float:
    """Loss in nats summed over all tokens of the first `count` samples."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    numbers = (range(first, min(first + batch_size, count)) for first in range(0, count, batch_size))
    read = partial(read_batch, samples, BatchForm(end_of_text=-1))
    with closing(threaded_map(read, numbers, 1)) as batches:
        for batch in batches:
            tokens, targets = batch.tokens.to(device), batch.targets.to(device)
            with autocast(precision, device):
                total += summed_loss(model(tokens), targets).double()
    return float(total)
