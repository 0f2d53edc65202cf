"""Philox is the published generator, and dropout's masks are functions of the seed, the offset and the element."""

import pytest
import torch

from training.kernels.philox import dropout_mask, kept, philox, scale

# counter, key, result: the known answers of Random123 (Salmon et al. 2011), file kat_vectors, philox4x32 10
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def mask(shape: list[int], p: float, seed: int, offset: int) -> torch.Tensor:
    return dropout_mask(torch.Size(shape), p, torch.tensor([seed, offset]))


def test_the_known_answers_are_found() -> None:
    for counter, key, expected in KNOWN:
        c0, c1, c2, c3, k0, k1 = (torch.tensor(int(word, 16)) for word in f"{counter} {key}".split())
        assert [f"{int(word):08x}" for word in philox((c0, c1, c2, c3), (k0, k1))] == expected.split()


def test_the_draws_of_a_mask_are_the_halves_of_the_known_answer() -> None:
    draws = [int(half, 16) for word in KNOWN[0][2].split() for half in (word[4:], word[:4])]
    for p in (0.2, 0.5, 0.8):
        assert mask([8], p, 0, 0).tolist() == [draw < round((1 - p) * 65536) for draw in draws]
        assert kept(p) / 65536 * scale(p) == 1 and scale(p) == pytest.approx(1 / (1 - p), rel=1e-4)
