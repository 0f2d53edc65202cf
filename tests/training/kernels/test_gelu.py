"""gelu(x + bias): kernels against float64, gradients, and the fallback."""

from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.kernels.helpers import assert_margins_untouched, assert_near, place
from training.kernels import library, shapes
from training.kernels.gelu import bias_gelu, reference_bias_gelu

# x's type and the bias's
PAIRS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
)
# rows, columns: one element, scalar tails, several blocks of columns, several strips of rows, any
RANDOM = Random(8)
SIZES = ((1, 1), (3, 7), (2, 520), (67, 72), (40, 33), (RANDOM.randrange(90), RANDOM.randrange(1, 900)))


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(size: tuple[int, int], types: tuple[torch.dtype, torch.dtype], offset: int, device: torch.device) -> None:
    rows, columns = size
    x = place(draw(rows, columns, seed=1), device, types[0], offset).requires_grad_()
    bias = place(draw(columns, seed=2), device, types[1], offset).requires_grad_()
    gradient = place(draw(rows, columns, seed=3), device, types[0], offset)
    exact_x, exact_bias = (tensor.detach().double().cpu().requires_grad_() for tensor in (x, bias))
    found, expected = bias_gelu(x, bias), reference_bias_gelu(exact_x, exact_bias)
    assert found.dtype == types[0]
    assert_near(found, expected)
    found.backward(gradient)
    expected.backward(gradient.double().cpu())
    for mine, exact, terms in ((x, exact_x, 1), (bias, exact_bias, rows)):
        assert mine.grad is not None and exact.grad is not None and mine.grad.dtype == mine.dtype
        assert_near(mine.grad, exact.grad, absolute=1e-5 * terms**0.5)
    assert_margins_untouched(x)


@pytest.mark.parametrize(("size", "types"), [*product(SIZES, PAIRS)])
def test_the_kernels_agree_with_float64(
    size: tuple[int, int], types: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    for offset in (0, 1):
        check(size, types, offset, device)


@pytest.mark.parametrize("columns", [8, 7])
def test_a_block_takes_many_rows(columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_BLOCKS", 2)
    check((70, columns), PAIRS[0], 0, device)


def test_extreme_inputs_stay_finite(device: torch.device) -> None:
    x = torch.tensor([-1e13, -1e4, -30.0, -0.0, 30.0, 1e4, 1e13, 1.0], device=device).requires_grad_()
    out = bias_gelu(x, torch.zeros(8, device=device))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(out.detach(), torch.where(x > 1.5, x, F.gelu(x * (x > -1e4), approximate="tanh")).detach())
    assert x.grad.tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1, 1, 1.0829641], abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float, device: torch.device) -> None:
    x = torch.tensor([1.0, bad], device=device)
    assert bias_gelu(x, torch.zeros(2, device=device)).isfinite().tolist() == [True, False]


def test_inputs_that_are_not_contiguous_are_copied(device: torch.device) -> None:
    x = draw(8, 6, seed=1).to(device).T.requires_grad_()
    bias = torch.ones(8, device=device)
    out = bias_gelu(x, bias)
    out.sum().backward()  # its gradient is an expanded number
    exact = x.detach().double().requires_grad_()
    reference_bias_gelu(exact, bias.double()).sum().backward()
    assert x.grad is not None and exact.grad is not None
    assert_near(x.grad, exact.grad)


def test_no_rows_are_no_error(device: torch.device) -> None:
    x, bias = torch.zeros(0, 9, device=device), torch.ones(9, device=device, requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.zeros_like(bias))


def test_arguments_that_kernels_would_misread_are_refused(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    for other in (x[0, :7], x[0].bfloat16(), x[0].double(), x[:1]):
        with pytest.raises((ValueError, library.KernelError)):
            bias_gelu(x, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_op_is_well_behaved(device: torch.device) -> None:
    x = draw(3, 8, seed=1).to(device).requires_grad_()
    bias = draw(8, seed=2).to(device).requires_grad_()
    torch.library.opcheck(torch.ops.gpt2.bias_gelu.default, (x, bias))
    torch.library.opcheck(torch.ops.gpt2.bias_gelu.default, (x.detach().bfloat16().requires_grad_(), bias))


def test_the_reference_has_right_gradients() -> None:
    x, bias = draw(3, 5, seed=1).double().requires_grad_(), draw(5, seed=2).double().requires_grad_()
    assert torch.autograd.gradcheck(reference_bias_gelu, (x, bias))


def test_what_is_not_selected_runs_in_pytorch(host_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(library, "call", lambda name, *arguments: calls.append(name))
    x, bias = draw(3, 8, seed=1), draw(8, seed=2)
    library.use_host_library(host_library)
    library.select({"add_dropout"})
    assert torch.equal(bias_gelu(x, bias), F.gelu(x + bias, approximate="tanh")) and not calls
    library.select({"bias_gelu"})
    bias_gelu(x, bias)
    assert calls == ["bias_gelu"]
    bias_gelu(x.double(), bias.double())
    assert calls == ["bias_gelu"]
    library.select(())
    library.use_host_library(None)
