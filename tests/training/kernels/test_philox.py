"""Philox is the published generator, and dropout's masks are functions of the seed, the offset and the element."""

import pytest
import torch
from torch import Tensor

from training.kernels.philox import dropout_mask, kept, philox, scale

# counter, key, result: the known answers of Random123 (Salmon et al. 2011), file kat_vectors, philox4x32 10
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def seed(value: int, offset: int) -> Tensor:
    return torch.tensor([value, offset])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_known_answers_are_found(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(int(word, 16)) for word in f"{counter} {key}".split())
    assert [f"{int(word):08x}" for word in philox((c0, c1, c2, c3), (k0, k1))] == expected.split()


def test_the_draws_of_a_mask_are_the_halves_of_the_known_answer() -> None:
    words = "6627e8d5 e169c58d bc57ac4c 9b00dbd8".split()
    draws = [int(half, 16) for word in words for half in (word[4:], word[:4])]
    for p in (0.2, 0.5, 0.8):
        expected = [draw < round((1 - p) * 65536) for draw in draws]
        assert dropout_mask(torch.Size([8]), p, seed(0, 0)).tolist() == expected


def test_a_negative_seed_uses_all_64_bits() -> None:
    shape = torch.Size([64])
    masks = [dropout_mask(shape, 0.5, seed(*pair)) for pair in ((-1, 0), (2**32 - 1, 0), (0, -1), (0, 2**32 - 1))]
    assert all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_a_mask_does_not_depend_on_the_shape() -> None:
    long = dropout_mask(torch.Size([1003]), 0.3, seed(5, 6))
    assert torch.equal(dropout_mask(torch.Size([17, 59]), 0.3, seed(5, 6)).flatten(), long)
    assert torch.equal(dropout_mask(torch.Size([5]), 0.3, seed(5, 6)), long[:5])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_and_the_scale_fit_p(p: float) -> None:
    count = 200_000
    share = dropout_mask(torch.Size([count]), p, seed(1, 2)).double().mean()
    assert abs(share - (1 - p)) < 4 * (p * (1 - p) / count) ** 0.5
    assert kept(p) / 65536 * scale(p) == 1
    assert scale(p) == pytest.approx(1 / (1 - p), rel=2**-17 / (1 - p))


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999, float("nan")])
def test_a_probability_that_keeps_nothing_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout"):
        kept(p)
