"""Vocabulary padding: a layout holds more embedding rows than there are tokens, and no padding row reaches a softmax.

The model and the checkpoints know the true vocabulary only; padding is added when a layout is built.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.settings import ModelSettings
from training.model import Head


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows, rounded up so that each tensor-parallel rank holds a multiple of 128 of them."""
    multiple = 128 * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def with_padded_vocabulary(model: ModelSettings, tensor_parallel: int) -> ModelSettings:
    """The settings of a model that carries the padding rows of a layout."""
    return model.model_copy(update={"vocab_size": padded_vocab_size(model.vocab_size, tensor_parallel)})


class PaddedHead(Head):
    """Head whose logits are -inf for padding rows."""

    vocab_bias: Tensor
    """(V,) 0 for true rows, -inf for padding rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("vocab_bias", torch.zeros(rows), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, C), (V, C) -> (B, T, V)."""
        return F.linear(x, weight, self.vocab_bias)


def vocab_bias(vocab_size: int, rows: int) -> Tensor:
    """The values of `PaddedHead.vocab_bias`, shape (rows,)."""
    bias = torch.zeros(rows)
    bias[vocab_size:] = -torch.inf
    return bias
