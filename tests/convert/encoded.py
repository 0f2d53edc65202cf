"""Weights whose values say where they belong: every float32 encodes (tensor, row, column)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from convert.sources.source import Architecture

_BITS = 22
_FACTOR = 2654435 * 2 + 1  # odd, so that multiplying is a permutation of the numbers below 2**_BITS
SMALL = Architecture(n_layer=4, n_head=8, n_embd=32, n_positions=24, n_inner=128, vocab_size=300)
"""Divides by tensor 1, 2, 4, 8 and pipeline 1, 2, 4; 300 tokens are padded to 384 rows (at 8 ranks 1024)."""


def shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape: [out, in], true vocabulary."""
    C, inner = model.n_embd, model.n_inner
    found: dict[str, tuple[int, ...]] = {"wte.weight": (model.vocab_size, C), "wpe.weight": (model.n_positions, C)}
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (inner, C), "mlp.c_proj": (C, inner)}
    for layer in range(model.n_layer):
        for norm in ("ln_1", "ln_2"):
            found |= {f"h.{layer}.{norm}.weight": (C,), f"h.{layer}.{norm}.bias": (C,)}
        for name, shape in linear.items():
            found |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[:1]}
    found |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return found if model.tied else found | {"lm_head.weight": (model.vocab_size, C)}


def truth(model: Architecture = SMALL) -> dict[str, Tensor]:
    """The model in our layout: [out, in], rows of c_attn [head, (q, k, v), dim], true vocabulary, values in ±0.5."""
    tensors, start = {}, 0
    for name, shape in shapes(model).items():
        count = torch.Size(shape).numel()
        index = torch.arange(start, start + count, dtype=torch.int64)
        code = (index * _FACTOR) % 2**_BITS
        tensors[name] = ((code - 2 ** (_BITS - 1)).double() / 2**_BITS).float().view(shape)
        start += count
    assert start <= 2**_BITS, "too many elements to encode"
    return tensors


def where(value: float, model: Architecture = SMALL) -> str:
    """`h.3.attn.c_attn.weight[5, 7]`: the place in `truth` that a value belongs to."""
    code = round(value * 2**_BITS) + 2 ** (_BITS - 1)
    index = code * pow(_FACTOR, -1, 2**_BITS) % 2**_BITS
    for name, shape in shapes(model).items():
        count = torch.Size(shape).numel()
        if index < count:
            return f"{name}[{', '.join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), shape))}]"
        index -= count
    return f"nowhere ({value})"


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], model: Architecture = SMALL) -> None:
    """Bit for bit; the message names the first wrong element and the place that its value comes from."""
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        wrong = (tensor != expected[name]).nonzero()
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            raise AssertionError(
                f"{name}{list(at)} has the value of {where(float(tensor[at]), model)}; {len(wrong)} wrong"
            )
