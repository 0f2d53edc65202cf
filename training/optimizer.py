"""AdamW and its learning rate, as GPT-2 recipes have them."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from common.settings import TrainSettings


def learning_rate(iteration: int, train: TrainSettings) -> float:
    """The rate of 0-based `iteration`: linear warm-up to `lr`, cosine to `min_lr`, which is then held.

    The cosine runs over the iterations after the warm-up, so it ends at `min_lr` exactly at the last one.
    """
    warmup = round(train.warmup * train.iterations)
    if iteration < warmup:
        return train.lr * (iteration + 1) / warmup
    progress = min(1.0, (iteration - warmup) / max(1, train.iterations - 1 - warmup))
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters: Iterable[nn.Parameter], train: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices, none on biases and LayerNorm (everything of one dimension).

    Its state exists from the start, all zeros, so that a checkpoint can be loaded into it in place.
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
