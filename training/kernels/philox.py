"""Dropout masks that can be drawn again: Philox4x32-10 (Salmon et al. 2011) in integer PyTorch operations.

csrc/common.cuh computes the same bits. One call with the counter (group, offset) and the key `seed` gives four 32-bit
words, that is eight draws of 16 bits, for the elements 8 * group to 8 * group + 7 of a tensor in memory order. An
element is kept if its draw is less than `kept(p)`.
"""

import torch
from torch import Tensor

GROUP = 8  # elements per call of Philox
DRAWS = 1 << 16  # values that a draw may have
_MASK = 0xFFFFFFFF
# The multipliers and key increments of the paper; a multiplier less 2^32, so that no product overflows int64
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def kept(p: float) -> int:
    """How many of the 65,536 draws keep an element: p is rounded to a multiple of 2^-16.

    Raises:
        ValueError: p is not in [0, 1), or so near to 1 that nothing would be kept.
    """
    count = round((1 - p) * DRAWS) if 0 <= p < 1 else 0
    if count == 0:
        raise ValueError(f"dropout {p}: must be at least 0 and less than 1 - 2^-17")
    return count


def scale(p: float) -> float:
    """What kept elements are multiplied by: the inverse of the probability that an element is kept."""
    return DRAWS / kept(p)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four counter words and two key words -> four words, as int64 in [0, 2^32), broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of word * (multiplier + 2^32)."""
    product = word * multiplier
    return (product >> 32) + word, product & _MASK


def dropout_mask(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """The elements that dropout keeps: a bool tensor on the seed's device; `seed` is (2,) int64, [seed, offset]."""
    count = shape.numel()
    group = torch.arange(-(-count // GROUP), device=seed.device)
    key, offset = seed.unbind()
    counter = (group & _MASK, group >> 32, offset & _MASK, (offset >> 32) & _MASK)
    words = torch.stack(philox(counter, (key & _MASK, (key >> 32) & _MASK)), dim=1)  # (groups, 4)
    draws = torch.stack([words % DRAWS, words // DRAWS], dim=2)  # (groups, 4, 2): the low half first
    return (draws.flatten()[:count] < kept(p)).view(shape)
