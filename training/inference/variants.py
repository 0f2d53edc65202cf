"""Variants of GPT-2 that are used and never trained: applied to a model from outside, before it gets its weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.huggingface.config import Variant
from training.model import GPT2, MLP, GeluLinear, Head, LayerNorm, Linear


class ExactGeluLinear(GeluLinear):
    """A matrix product and GELU in its exact form."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return F.gelu(Linear.forward(self, x))


class UntiedHead(Head):
    """Logits by a weight of its own."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, C), (V, C) of the embedding, which is not used -> (B, T, V)."""
        return super().forward(x, self.weight)


def become(model: GPT2, variant: Variant) -> None:
    """Turn a model that has no weights yet into the variant."""
    width = model.settings.n_embd
    for module in model.modules():
        if isinstance(module, MLP):
            module.c_fc = (ExactGeluLinear if variant.exact_gelu else GeluLinear)(width, variant.n_inner)
            module.c_proj = Linear(variant.n_inner, width)
        elif isinstance(module, LayerNorm):
            module.eps = variant.layer_norm_epsilon
    if not variant.tied:
        model.head = UntiedHead(model.settings.vocab_size, width)
