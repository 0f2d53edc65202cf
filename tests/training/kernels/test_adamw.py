"""The optimiser's passes over many tensors: float64, torch.optim.AdamW, bitwise repeats."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics import assert_close, tolerance
from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, draw, place
from training.kernels.adamw import CHUNK, Hyper, adamw_, reference_adamw_, reference_sum_of_squares, sum_of_squares

# one element, nothing, tails, a whole chunk, a chunk and a tail
SHAPES = ((1,), (0,), (3, 5), (4, 8), (CHUNK,), (CHUNK + 7,), (33, 2))
HYPER: dict[str, Any] = {"rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def tensors(device: torch.device, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One of each shape; every other one begins off 16 bytes."""
    return [place(draw(*shape, seed=seed + i), device, dtype, i % 2) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_squares_agrees_with_float64_and_repeats_bitwise(dtype: torch.dtype, device: torch.device) -> None:
    given = tensors(device, dtype, 0)
    found = sum_of_squares(given)
    expected = sum(float(tensor.double().square().sum()) for tensor in given)
    assert found.dtype == torch.float64 and found.shape == ()
    near = tolerance(2**11)  # squares that one lane of PyTorch's norm adds, or a thread and its block
    assert [float(found), float(reference_sum_of_squares(given))] == pytest.approx([expected] * 2, rel=near)
    assert torch.equal(sum_of_squares(given), found)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_a_number_that_is_not_finite_makes_the_sum_so(number: float, device: torch.device) -> None:
    given = tensors(device, torch.float32, 0)
    given[5][-1] = number
    for found in (sum_of_squares(given), reference_sum_of_squares(given)):
        assert not found.isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_agrees_with_float64(dtype: torch.dtype, device: torch.device) -> None:
    parameters, exp_avgs = tensors(device, torch.float32, 10), tensors(device, torch.float32, 20)
    exp_avg_sqs = [tensor.square_() for tensor in tensors(device, torch.float32, 30)]
    gradients = tensors(device, dtype, 40)
    decays = [0.1 * (i % 3) for i in range(len(SHAPES))]
    exact = [[tensor.double().cpu() for tensor in each] for each in (parameters, gradients, exp_avgs, exp_avg_sqs)]
    factor = torch.tensor(0.37)
    for step in (1, 2, 1000):
        adamw_(
            parameters, gradients, exp_avgs, exp_avg_sqs,
            decays, factor.to(device), Hyper(**HYPER, step=step),
        )  # fmt: skip
        reference_adamw_(*exact, decays, factor.double(), Hyper(**HYPER, step=step))
    for found, expected in zip((parameters, gradients, exp_avgs, exp_avg_sqs), exact, strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other, terms=3 * 6, scale=1)  # three steps of six roundings each
            assert_margins_untouched(mine)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_pytorchs(weight_decay: float, device: torch.device) -> None:
    start = [draw(*shape, seed=50 + i).to(device).requires_grad_() for i, shape in enumerate(SHAPES[:4])]
    peers = [tensor.detach().clone().requires_grad_() for tensor in start]
    peer = torch.optim.AdamW(peers, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, fused=True)
    moments = [[torch.zeros_like(tensor) for tensor in start] for _ in range(2)]
    for step in range(1, 6):
        gradients = [draw(*shape, seed=60 * step + i).to(device) for i, shape in enumerate(SHAPES[:4])]
        for tensor, gradient in zip(peers, gradients, strict=True):
            tensor.grad = gradient * 0.5
        peer.step()
        with torch.no_grad():
            adamw_(
                start, gradients, *moments,
                [weight_decay] * 4, torch.tensor(0.5, device=device), Hyper(**HYPER, step=step),
            )  # fmt: skip
    for index, (found, expected) in enumerate(zip(start, peers, strict=True)):
        assert_close(found, expected, terms=5 * 6)
        for key, mine in (("exp_avg", moments[0]), ("exp_avg_sq", moments[1])):
            assert_close(mine[index], peer.state[expected][key], terms=5 * 3, scale=0.1)


def test_a_sum_of_squares_is_exact_at_the_size_of_an_embedding() -> None:
    """torch's float32 norm of so many elements is 6e-5 too low on a CPU; at GPT-2's width, 1e-3."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((50257, 48), (3, 5), (0, 7), ())]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors)) == pytest.approx(exact, rel=tolerance(4))
    turned = tensors[0].t()
    assert float(sum_of_squares([turned])) == pytest.approx(float(turned.double().square().sum()), rel=tolerance(4))
    assert sum_of_squares([]).dtype == torch.float64
