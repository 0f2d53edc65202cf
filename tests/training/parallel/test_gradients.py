"""Gradient norms are accurate for any number of elements."""

import pytest
import torch

from training.parallel.gradients import sum_of_squares


def test_a_sum_of_squares_is_exact_at_the_size_of_an_embedding() -> None:
    """torch's float32 norm of so many elements is 6e-5 too low on a CPU, 1e-3 at the width of GPT-2."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((50257, 48), (3, 5), (0, 7), ())]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors)) == pytest.approx(exact, rel=1e-7)
    turned = tensors[0].t()
    assert float(sum_of_squares([turned])) == pytest.approx(float(turned.double().square().sum()), rel=1e-7)
    assert sum_of_squares([]).dtype == torch.float64


def test_one_non_finite_number_makes_the_norm_non_finite() -> None:
    for number in (torch.nan, torch.inf):
        assert not torch.isfinite(sum_of_squares([torch.ones(40000), torch.tensor([1.0, number])]))
