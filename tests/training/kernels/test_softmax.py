"""The masked softmax against float64: shapes with tails, few queries, every dtype and alignment."""

from itertools import product

import pytest
import torch
from torch.autograd import gradcheck

from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, assert_near, place
from training.kernels.softmax import causal_softmax, reference_causal_softmax

# one score, a tail, more keys than queries, one query, rows of several packs per lane
SHAPES = ((1, 1, 1), (2, 3, 5, 5), (3, 7, 40), (5, 1, 33), (2, 300, 304))


@pytest.mark.parametrize(("shape", "dtype", "offset"), [*product(SHAPES, DTYPES, (0, 1))])
def test_the_kernels_agree_with_float64(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    placed = place(torch.randn(shape) * 8, device, dtype, offset)
    scores = placed.detach().requires_grad_()
    gradient = place(torch.randn(shape), device, dtype, offset)
    exact = placed.double().cpu().requires_grad_()
    expected = reference_causal_softmax(exact, 0.3)
    found = causal_softmax(scores, 0.3)
    assert_near(found, expected)
    (slope,) = torch.autograd.grad(found, scores, gradient)
    (expected_slope,) = torch.autograd.grad(expected, exact, gradient.double().cpu())
    # the backward reads probabilities that are rounded to the dtype
    assert_near(slope, expected_slope, absolute=4 * torch.finfo(dtype).eps)
    assert_margins_untouched(placed)
    assert_margins_untouched(gradient)


def test_scores_that_are_masked_are_never_read(device: torch.device) -> None:
    scores = torch.randn(2, 9, 12, device=device)
    scores.masked_fill_(torch.ones(9, 12, dtype=torch.bool, device=device).triu(4), torch.nan)
    found = causal_softmax(scores, 1.0)
    assert found.isfinite().all()
    assert_near(found.sum(-1), torch.ones(2, 9))


def test_the_gradient_of_the_reference_is_right() -> None:
    scores = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: reference_causal_softmax(x, 0.7), scores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_op_is_well_behaved(device: torch.device) -> None:
    scores = torch.randn(2, 3, 5, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gpt2.causal_softmax.default, (scores, 0.5))
    # scores that are a view, as q @ k.mT may be
    torch.library.opcheck(torch.ops.gpt2.causal_softmax.default, (scores.detach().transpose(0, 1), 0.5))
