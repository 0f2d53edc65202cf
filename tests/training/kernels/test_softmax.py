"""The masked softmax against float64: shapes with tails, few queries, every dtype and alignment."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import (
    DTYPES,
    assert_margins_untouched,
    assert_near,
    draw,
    offsets,
    place,
    some_examples,
)
from training.kernels.softmax import causal_softmax, reference_causal_softmax


@example(shape=(1, 1, 1), dtype=torch.float32, offset=0, backwards=False)
@example(shape=(2, 300, 4), dtype=torch.bfloat16, offset=0, backwards=True)  # rows of several packs per lane
@example(shape=(5, 1, 32), dtype=torch.float16, offset=1, backwards=False)  # one query
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(0, 40)),
    dtype=st.sampled_from(DTYPES),
    offset=offsets,
    backwards=st.booleans(),
)
@some_examples
def test_the_kernels_agree_with_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, offset: int, backwards: bool, device: torch.device
) -> None:
    run_backwards(backwards)
    heads, queries, earlier = shape
    form = (heads, queries, queries + earlier)
    placed = place(8 * draw(*form, seed=1), device, dtype, offset)
    scores = placed.detach().requires_grad_()
    gradient = place(draw(*form, seed=2), device, dtype, offset)
    exact = placed.double().cpu().requires_grad_()
    expected, found = reference_causal_softmax(exact, 0.3), causal_softmax(scores, 0.3)
    assert_near(found, expected)
    (slope,) = torch.autograd.grad(found, scores, gradient)
    (expected_slope,) = torch.autograd.grad(expected, exact, gradient.double().cpu())
    # the backward reads probabilities that are rounded to the dtype
    assert_near(slope, expected_slope, absolute=4 * torch.finfo(dtype).eps)
    assert_margins_untouched(placed, gradient)


def test_scores_that_are_masked_are_never_read(device: torch.device) -> None:
    scores = torch.randn(2, 9, 12, device=device)
    scores.masked_fill_(torch.ones(9, 12, dtype=torch.bool, device=device).triu(4), torch.nan)
    found = causal_softmax(scores, 1.0)
    assert found.isfinite().all()
    assert_near(found.sum(-1), torch.ones(2, 9))


def test_a_query_sees_the_keys_up_to_its_own_position() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, 5.0], [0.0, 1.0, 2.0, 5.0]])
    expected = [[*(scores[0, :3] / 2).softmax(-1).tolist(), 0.0], (scores[1] / 2).softmax(-1).tolist()]
    assert_near(reference_causal_softmax(scores, 0.5), torch.tensor(expected))
