"""x + dropout(branch) and its LayerNorm: kernels against float64, gradients and masks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.numerics import assert_close
from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, draw, offsets, place, some_examples
from training.kernels import library
from training.kernels.residual import add_dropout_norm, dropout_mask, philox, reference_add_dropout

# counter, key, result: known answers of Random123 (Salmon et al. 2011), kat_vectors, philox4x32 10
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
EPS = 1e-5
SEED = torch.tensor([-(2**40) - 3, 2**35 + 1])


@example(rows=1, columns=1, dtype=DTYPES[0], offset=0, p=0.0, backwards=False)
@example(rows=2, columns=4104, dtype=DTYPES[2], offset=0, p=0.3, backwards=True)  # more than registers hold
@example(rows=600, columns=7, dtype=DTYPES[0], offset=1, p=0.25, backwards=False)  # a block takes two rows
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    offset=offsets,
    p=st.sampled_from([0.0, 0.3]),
    backwards=st.booleans(),
)
@some_examples
def test_sum_and_norm_agree_with_float64(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    offset: int,
    p: float,
    backwards: bool,
    device: torch.device,
) -> None:
    run_backwards(backwards)

    def make(seed: int, *shape: int) -> Tensor:
        return place(draw(*shape, seed=seed), device, dtype, offset)

    x, branch, d_total, d_normed = (make(seed, rows, columns) for seed in (1, 2, 6, 7))
    weight, bias = make(4, columns), make(5, columns)
    given = [x, branch, weight, bias]
    mine = [tensor.detach().requires_grad_() for tensor in given]
    exact = [tensor.double().cpu().requires_grad_() for tensor in given]
    mask = (p, SEED.to(device) if p else None)
    expected = reference_add_dropout(*exact[:2], p, SEED)
    total, normed = add_dropout_norm(*mine[:2], *mask, *mine[2:], EPS)
    # the norm is that of the sum as it was rounded
    rounded = expected + (total.detach().double().cpu() - expected).detach()
    expected_normed = F.layer_norm(rounded, (columns,), *exact[2:], EPS)
    assert total.dtype == normed.dtype == dtype
    scale = float((rounded.detach().var(1, correction=0) + EPS).rsqrt().max())  # 316 where a row has one value
    assert_close(normed, expected_normed, terms=columns, scale=scale)
    torch.autograd.backward([total, normed], [d_total, d_normed])
    slopes = [d_total.double().cpu(), d_normed.double().cpu()]
    torch.autograd.backward([expected, expected_normed], slopes)
    assert_close(total, expected, terms=1)
    for found, wanted in zip(mine, exact, strict=True):
        assert found.grad is not None and found.grad.dtype == found.dtype
        assert_close(found.grad, wanted.grad, terms=rows + columns, scale=scale)
    assert_margins_untouched(x, branch, weight, bias, d_total, d_normed)


def test_with_one_output_used_gradients_are_the_references(device: torch.device) -> None:
    x, branch, slope = (draw(4, 16, seed=seed).to(device) for seed in (1, 2, 3))
    weight, norm_bias = draw(16, seed=4).to(device), draw(16, seed=5).to(device)
    for used, p in ((0, 0.3), (1, 0.0), (1, 0.3)):
        gradients = []
        for kernels in (library.KERNELS, ()):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, branch, weight, norm_bias)]
            with library.using(kernels):
                found = add_dropout_norm(leaves[0], leaves[1], p, SEED.to(device), leaves[2], leaves[3], EPS)
            grads = torch.autograd.grad(found[used], leaves, slope, allow_unused=True)
            gradients.append([torch.zeros(()) if grad is None else grad for grad in grads])
        for mine, expected in zip(*gradients, strict=True):
            assert_close(mine + torch.zeros_like(expected), expected + torch.zeros_like(mine), terms=4 + 16)


def test_the_known_answers_of_philox_are_found_and_their_halves_are_the_draws_of_a_mask() -> None:
    for counter, key, expected in KNOWN:
        c0, c1, c2, c3, k0, k1 = (torch.tensor(int(word, 16)) for word in f"{counter} {key}".split())
        assert [f"{int(word):08x}" for word in philox((c0, c1, c2, c3), (k0, k1))] == expected.split()
    draws = [int(half, 16) for word in KNOWN[0][2].split() for half in (word[4:], word[:4])]
    for p in (0.2, 0.5, 0.8):
        mask = dropout_mask(torch.Size([8]), p, torch.zeros(2, dtype=torch.int64))
        assert mask.tolist() == [draw < round((1 - p) * 65536) for draw in draws]


def test_the_limit_of_a_draw_is_exact(device: torch.device) -> None:
    first = 0xE8D5  # the first draw of seed 0, offset 0: the low half of a known answer of Philox
    ones, seed = torch.ones(8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for keeps, result in ((first, 0.0), (first + 1, 65536 / (first + 1))):
        total, _ = add_dropout_norm(0 * ones, ones, 1 - keeps / 65536, seed, ones, ones, EPS)
        assert float(total[0]) == pytest.approx(result, rel=1e-6)
        assert torch.equal(total.cpu() > 0, dropout_mask(torch.Size([8]), 1 - keeps / 65536, seed.cpu()))
