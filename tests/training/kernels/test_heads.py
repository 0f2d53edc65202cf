"""The gradients of queries, keys and values, put together by the kernel, against PyTorch's."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.numerics import assert_close
from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import DTYPES, draw, place, some_examples
from training.kernels.ops import heads_of, split_heads


@example(samples=1, tokens=1, heads=1, size=1, dtype=DTYPES[0], backwards=False)
@example(samples=2, tokens=67, heads=3, size=16, dtype=DTYPES[2], backwards=True)  # wide; several strips and blocks
@given(
    samples=st.integers(1, 3),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    size=st.sampled_from([1, 4, 7, 8, 64]),
    dtype=st.sampled_from(DTYPES),
    backwards=st.booleans(),
)
@some_examples
def test_the_gradients_of_a_product_and_its_bias_are_those_of_three_views(
    samples: int, tokens: int, heads: int, size: int, dtype: torch.dtype, backwards: bool, device: torch.device
) -> None:
    run_backwards(backwards)
    width = 3 * heads * size
    qkv = place(draw(samples * tokens, width, seed=1), device, dtype, 0).view(samples, tokens, width).requires_grad_()
    bias = torch.zeros(width, device=device, dtype=dtype, requires_grad=True)  # in qkv already
    # attention's gradients lie as (B, T, nh, hs) in memory, and may lie otherwise
    slopes = [place(draw(samples * tokens, heads * size, seed=seed), device, dtype, 0) for seed in (2, 3, 4)]
    slopes = [each.view(samples, tokens, heads, size).transpose(1, 2) for each in slopes]
    slopes[2] = slopes[2].contiguous()
    exact = qkv.detach().double().cpu().requires_grad_()
    found, expected = split_heads(qkv, bias, size), heads_of(exact, size)
    for part, whole in zip(found, expected, strict=True):
        assert torch.equal(part.detach().double().cpu(), whole.detach())
    torch.autograd.backward(found, slopes)
    torch.autograd.backward(expected, [slope.double().cpu() for slope in slopes])
    assert qkv.grad is not None and exact.grad is not None and bias.grad is not None
    assert torch.equal(qkv.grad.double().cpu(), exact.grad)  # moved, not computed
    assert_close(bias.grad, exact.grad.sum((0, 1)), terms=samples * tokens, scale=1)
