"""gelu(x + bias): kernels against float64, and their gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from tests.numerics import assert_close, tolerance
from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import (
    DTYPES,
    assert_margins_untouched,
    draw,
    offsets,
    place,
    some_examples,
)
from training.kernels.ops import bias_gelu

GELU = 10 * 5**2  # ten roundings, magnified by tanh's argument, which is up to 5 where its slope is not 0


@example(rows=1, columns=1, dtype=DTYPES[0], offset=0, backwards=False)
@example(rows=67, columns=72, dtype=DTYPES[2], offset=0, backwards=True)  # several strips of rows
@example(rows=2, columns=520, dtype=DTYPES[1], offset=0, backwards=False)  # several blocks of columns
@example(rows=5400, columns=7, dtype=DTYPES[0], offset=1, backwards=False)  # a block takes many rows
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    offset=offsets,
    backwards=st.booleans(),
)
@some_examples
def test_the_kernels_agree_with_float64(
    rows: int, columns: int, dtype: torch.dtype, offset: int, backwards: bool, device: torch.device
) -> None:
    run_backwards(backwards)
    x = place(3 * draw(rows, columns, seed=1), device, dtype, offset).requires_grad_()
    bias = place(3 * draw(columns, seed=2), device, dtype, offset).requires_grad_()
    gradient = place(3 * draw(rows, columns, seed=3), device, dtype, offset)
    exact_x, exact_bias = (tensor.detach().double().cpu().requires_grad_() for tensor in (x, bias))
    found, expected = bias_gelu(x, bias), bias_gelu(exact_x, exact_bias)
    assert found.dtype == dtype
    assert_close(found, expected, terms=GELU, scale=1)  # 1 + tanh cancels
    found.backward(gradient)
    expected.backward(gradient.double().cpu())
    for mine, exact, terms in ((x, exact_x, GELU), (bias, exact_bias, GELU + rows)):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype
        assert_close(mine.grad, exact.grad, terms=terms, scale=1)
    assert_margins_untouched(x)


def test_extreme_inputs_stay_finite_and_what_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.tensor([-1e13, -1e4, -30.0, -0.0, 30.0, 1e4, 1e13, 1.0], device=device).requires_grad_()
    out = bias_gelu(x, torch.zeros(8, device=device))
    out.sum().backward()
    assert x.grad is not None
    expected = torch.where(x > 1.5, x, F.gelu(x * (x > -1e4), approximate="tanh"))
    assert out.tolist() == pytest.approx(expected.tolist(), rel=tolerance(GELU))
    assert x.grad.tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1, 1, 1.0829641], abs=1e-6)
    bad = torch.tensor([1.0, torch.nan, torch.inf], device=device)
    assert bias_gelu(bad, torch.zeros(3, device=device)).isfinite().tolist() == [True, False, False]
