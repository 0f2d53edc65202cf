"""The cross-entropy kernels against float64, on every part of a vocabulary."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, assert_near, offsets, place, some_examples
from training.kernels import cross_entropy
from training.kernels.cross_entropy import IGNORED, reference_backward_, reference_statistics


def make(n: int, v: int, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Logits (N, V) with NaN in the padding columns, and targets, some of them elsewhere."""
    generator = torch.Generator().manual_seed(n * v + first)
    logits = torch.randn(n, v, generator=generator) * 4
    logits[:, rows:] = torch.nan
    targets = torch.randint(max(first - 2, 0), first + v + 2, (n,), generator=generator)
    targets[0] = first + rows - 1
    targets[n // 2] = IGNORED if n > 2 else targets[n // 2]
    return logits, targets


@example(n=1, v=1, first=0, padding=0, dtype=torch.float32, offset=0, backwards=False)
@example(n=4, v=1024, first=0, padding=7, dtype=torch.bfloat16, offset=0, backwards=True)
@example(n=2, v=2051, first=100, padding=2, dtype=torch.float32, offset=1, backwards=False)
@example(n=2, v=64, first=128, padding=64, dtype=torch.float16, offset=0, backwards=False)  # all of it is padding
@given(
    n=st.integers(1, 6),
    v=st.integers(1, 300),
    first=st.integers(0, 200),
    padding=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    offset=offsets,
    backwards=st.booleans(),
)
@some_examples
def test_the_kernels_agree_with_float64(
    n: int, v: int, first: int, padding: int, dtype: torch.dtype, offset: int, backwards: bool, device: torch.device
) -> None:
    run_backwards(backwards)
    rows = max(0, v - padding)
    values, targets = make(n, v, first, rows)
    logits = place(values, device, dtype, offset)
    exact = logits.double().cpu()
    expected = reference_statistics(exact, targets, first, rows)
    found = cross_entropy.statistics(logits, targets.to(device), first, rows)
    assert_near(found, expected, absolute=1e-5)

    # as if other parts of the vocabulary held as much again
    log_sum_exp = (expected[:, 0] + (2 * expected[:, 1] + 1).log()).float()
    gradient = torch.rand(n)
    reference_backward_(exact, targets, log_sum_exp.double(), gradient.double(), first, rows)
    cross_entropy.backward_(logits, targets.to(device), log_sum_exp.to(device), gradient.to(device), first, rows)
    assert_near(logits, exact, absolute=1e-7 if dtype == torch.float16 else 1e-6)
    assert_margins_untouched(logits)


def test_large_and_masked_logits_stay_finite_and_what_is_not_finite_shows(device: torch.device) -> None:
    logits = torch.full((2, 40), -torch.inf)
    logits[1, 3] = 3e38
    found = cross_entropy.statistics(logits.to(device), torch.tensor([0, 3], device=device), 0, 40).cpu()
    assert found[0, 1] == 0 and found[0, 0] == torch.finfo(torch.float32).min
    assert found[1].tolist() == pytest.approx([3e38, 1, 3e38])
    for bad in (torch.nan, torch.inf):
        logits, targets = make(2, 100, 0, 100)
        logits[1, 50] = bad
        found = cross_entropy.statistics(logits.to(device), targets.to(device), 0, 100)
        assert found[0].isfinite().all() and found[1, 1].isnan()
