"""Weights of which no two elements are equal, so that an exchanged row, column or tensor shows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from convert.sources.source import Architecture

_BITS = 22
_FACTOR = 2654435 * 2 + 1  # odd, so that multiplying is a permutation of the numbers below 2**_BITS
SMALL = Architecture(n_layer=4, n_head=8, n_embd=32, n_positions=24, n_inner=128, vocab_size=300)
"""Divides by tensor 1, 2, 4, 8 and pipeline 1, 2, 4; 300 tokens are padded to 384 rows or 1024."""


def truth(model: Architecture = SMALL) -> dict[str, Tensor]:
    """The model in our layout: [out, in], c_attn [head, (q, k, v), dim], no padding, in ±0.5."""
    C, inner = model.n_embd, model.n_inner
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (model.vocab_size, C), "wpe.weight": (model.n_positions, C)}
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (inner, C), "mlp.c_proj": (C, inner)}
    norms = [f"h.{layer}.{norm}" for layer in range(model.n_layer) for norm in ("ln_1", "ln_2")]
    shapes |= {f"{norm}.{kind}": (C,) for norm in (*norms, "ln_f") for kind in ("weight", "bias")}
    for layer in range(model.n_layer):
        for name, shape in linear.items():
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[:1]}
    shapes |= {} if model.tied else {"lm_head.weight": (model.vocab_size, C)}
    tensors, start = {}, 0
    for name, shape in shapes.items():
        index = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.int64)
        start += len(index)
        code = (index * _FACTOR) % 2**_BITS
        tensors[name] = ((code - 2 ** (_BITS - 1)).double() / 2**_BITS).float().view(shape)
    assert start <= 2**_BITS, "too many elements to encode"
    return tensors


def assert_equal(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], model: Architecture = SMALL) -> None:
    """The same names, shapes and values; `model` is the one of `expected`."""
    assert sorted(weights) == sorted(expected)
    for name, tensor in weights.items():
        assert tensor.shape == expected[name].shape, name
        wrong = (tensor != expected[name]).nonzero()
        assert not len(wrong), f"{name}{wrong[0].tolist()} of {model}; {len(wrong)} wrong"
