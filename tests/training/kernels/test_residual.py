"""x + dropout(branch + bias) and its LayerNorm: kernels against float64, gradients, masks, and the fallback."""

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.kernels.helpers import assert_margins_untouched, assert_near, place
from training.kernels import library, shapes
from training.kernels.philox import dropout_mask, scale
from training.kernels.residual import (
    add_dropout,
    add_dropout_norm,
    reference_add_dropout,
    reference_add_dropout_norm,
)

# x's type and the branch's
PAIRS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
)
# rows, columns: one element, scalar tails, one and several warps, more columns than a block's registers hold, any
RANDOM = Random(8)
SIZES = ((1, 1), (3, 7), (5, 8), (2, 520), (13, 264), (2, 4104), (RANDOM.randrange(30), RANDOM.randrange(1, 900)))
EPS = 1e-5
SEED = torch.tensor([-(2**40) - 3, 2**35 + 1])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Arguments of the ops on a device, and the same in float64."""

    def __init__(
        self, size: tuple[int, int], types: tuple[torch.dtype, torch.dtype], offset: int, p: float, device: torch.device
    ) -> None:
        rows, columns = size
        wide, narrow = types

        def make(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
            return place(draw(*shape, seed=seed), device, dtype, offset).requires_grad_()

        self.x, self.branch = make(wide, rows, columns, seed=1), make(narrow, rows, columns, seed=2)
        self.bias = make(wide, columns, seed=3) if p else None
        self.weight, self.norm_bias = make(wide, columns, seed=4), make(wide, columns, seed=5)
        self.p, self.seed = p, SEED.to(device) if p else None
        self.d_total = place(draw(rows, columns, seed=6), device, wide, offset)
        self.d_normed = place(draw(rows, columns, seed=7), device, narrow, offset)

    def arguments(self, norm: bool) -> tuple[Any, ...]:
        rest = (self.weight, self.norm_bias, EPS) if norm else ()
        return (self.x, self.branch, self.bias, self.p, self.seed, *rest)

    def exact(self, norm: bool) -> tuple[Any, ...]:
        """The arguments in float64 on the CPU."""
        return tuple(
            value if not isinstance(value, Tensor)
            else SEED if value is self.seed
            else value.detach().double().cpu().requires_grad_()
            for value in self.arguments(norm)
        )  # fmt: skip


def check_gradients(found: tuple[Any, ...], exact: tuple[Any, ...]) -> None:
    for mine, expected in zip(found, exact, strict=True):
        if isinstance(mine, Tensor) and mine.requires_grad:
            assert mine.grad is not None and mine.grad.dtype == mine.dtype
            assert_near(mine.grad, expected.grad, absolute=1e-5)


@pytest.mark.parametrize(("size", "types"), [*product(SIZES, PAIRS)])
def test_the_sum_agrees_with_float64(
    size: tuple[int, int], types: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    for offset, p in product((0, 1), (0.0, 0.3)):
        check_sum(Case(size, types, offset, p, device))


def check_sum(case: Case) -> None:
    arguments, exact = case.arguments(norm=False), case.exact(norm=False)
    total = add_dropout(*arguments)
    assert total.dtype == case.x.dtype
    expected = reference_add_dropout(*exact)
    assert_near(total, expected)
    total.backward(case.d_total)
    expected.backward(case.d_total.double().cpu())
    check_gradients(arguments, exact)
    for tensor in (case.x, case.branch):
        assert_margins_untouched(tensor)


@pytest.mark.parametrize(("size", "types"), [*product(SIZES, PAIRS)])
def test_the_norm_agrees_with_float64(
    size: tuple[int, int], types: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    for offset, p in product((0, 1), (0.0, 0.3)):
        check_norm(Case(size, types, offset, p, device))


def check_norm(case: Case) -> None:
    arguments, exact = case.arguments(norm=True), case.exact(norm=True)
    total, normed = add_dropout_norm(*arguments)
    assert (total.dtype, normed.dtype) == (case.x.dtype, case.branch.dtype)
    expected = reference_add_dropout(*exact[:5])
    assert_near(total, expected)
    # the norm is that of the sum as it was rounded
    rounded = expected + (total.detach().double().cpu() - expected).detach()
    expected_normed = F.layer_norm(rounded, rounded.shape[1:], exact[5], exact[6], EPS)
    assert_near(normed, expected_normed, absolute=1e-5)
    torch.autograd.backward([total, normed], [case.d_total, case.d_normed])
    torch.autograd.backward([expected, expected_normed], [case.d_total.double().cpu(), case.d_normed.double().cpu()])
    check_gradients(arguments, exact)


@pytest.mark.parametrize("columns", [8, 7])
def test_a_block_takes_many_rows(columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_BLOCKS", 2)
    monkeypatch.setattr("training.kernels.residual.NORM_BLOCKS", 3)
    case = Case((70, columns), PAIRS[0], 0, 0.25, device)
    for norm, operation, reference in (
        (False, add_dropout, reference_add_dropout),
        (True, add_dropout_norm, reference_add_dropout_norm),
    ):
        arguments, exact = case.arguments(norm), case.exact(norm)
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                tensor.grad = None
        found, expected = operation(*arguments), reference(*exact)
        (found[1] if norm else found).backward(case.d_normed)
        (expected[1] if norm else expected).backward(case.d_normed.double().cpu())
        check_gradients(arguments, exact)


@pytest.mark.parametrize("columns", [64, 33])
def test_kernels_keep_what_the_reference_keeps(columns: int, device: torch.device) -> None:
    shape, seed = torch.Size([50, columns]), SEED.to(device)
    mask = dropout_mask(shape, 0.4, SEED)
    zeros, ones = torch.zeros(shape, device=device), torch.ones(shape, device=device, requires_grad=True)
    expected = mask * torch.tensor(scale(0.4))
    total = add_dropout(zeros, ones, None, 0.4, seed)
    total.backward(torch.ones_like(total))
    vector = torch.ones(columns, device=device)
    other, _ = add_dropout_norm(zeros, ones, None, 0.4, seed, vector, vector, EPS)
    other.backward(torch.ones_like(other))
    assert torch.equal(total.cpu(), expected) and torch.equal(other.cpu(), expected)
    assert ones.grad is not None and torch.equal(ones.grad.cpu(), 2 * expected)


def test_the_limit_of_a_draw_is_exact(device: torch.device) -> None:
    first = 0xE8D5  # the first draw of seed 0, offset 0: the low half of a known answer of Philox
    ones, seed = torch.ones(8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for keeps, result in ((first, 0.0), (first + 1, 65536 / (first + 1))):
        total = add_dropout(0 * ones, ones, None, 1 - keeps / 65536, seed)
        assert float(total[0]) == pytest.approx(result, rel=1e-6)
        mask = dropout_mask(torch.Size([8]), 1 - keeps / 65536, seed.cpu())
        assert torch.equal(total.cpu() > 0, mask)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone_has_its_gradient(used: int, device: torch.device) -> None:
    case = Case((4, 16), PAIRS[0], 0, 0.3, device)
    arguments, exact = case.arguments(norm=True), case.exact(norm=True)
    add_dropout_norm(*arguments)[used].backward(case.d_total)
    reference_add_dropout_norm(*exact)[used].backward(case.d_total.double().cpu())
    for mine, expected in zip(arguments, exact, strict=True):
        if isinstance(mine, Tensor) and mine.requires_grad:
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            assert mine.grad is not None
            assert_near(mine.grad, wanted, absolute=1e-5)


def test_no_rows_are_no_error(device: torch.device) -> None:
    x = torch.zeros(0, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)
    total, normed = add_dropout_norm(x, x, weight, 0.0, None, weight, weight, EPS)
    (add_dropout(total, normed, weight, 0.0, None).sum() + normed.sum()).backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_inputs_that_are_not_contiguous_are_copied(device: torch.device) -> None:
    x, branch = draw(8, 6, seed=1).to(device).T, draw(8, 6, seed=2).to(device).T
    vector = torch.ones(8, device=device)
    assert_near(add_dropout(x, branch, None, 0.0, None), (x + branch).double())
    total, normed = add_dropout_norm(x, branch, None, 0.0, None, vector, vector, EPS)
    assert_near(total, (x + branch).double())
    assert_near(normed, F.layer_norm((x + branch).double(), (8,), eps=EPS) + 1, absolute=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"branch": torch.zeros(2, 9)},
        {"branch": torch.zeros(2, 8, dtype=torch.float64)},
        {"x": torch.zeros(2, 8, dtype=torch.bfloat16)},
        {"bias": torch.zeros(7)},
        {"weight": torch.zeros(8, dtype=torch.bfloat16)},
        {"seed": None},
        {"seed": torch.zeros(2)},
        {"p": 1.0},
    ],
    ids=str,
)
def test_arguments_that_kernels_would_misread_are_refused(change: dict[str, Any], device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the same Python code")
    vector, matrix = torch.zeros(8), torch.zeros(2, 8)
    arguments = {"x": matrix, "branch": matrix, "bias": vector, "p": 0.1, "seed": SEED, "weight": vector}
    arguments |= {"norm_bias": vector, "eps": EPS} | change
    with pytest.raises((ValueError, library.KernelError)):
        add_dropout_norm(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_ops_are_well_behaved(p: float, device: torch.device) -> None:
    for case in (Case((3, 8), PAIRS[0], 0, p, device), Case((3, 8), PAIRS[4], 0, p, device)):
        torch.library.opcheck(torch.ops.gpt2.add_dropout.default, case.arguments(norm=False))
        torch.library.opcheck(torch.ops.gpt2.add_dropout_norm.default, case.arguments(norm=True))


@pytest.mark.parametrize(("p", "with_bias"), [(0.0, False), (0.4, True)])
def test_the_references_have_right_gradients(p: float, with_bias: bool) -> None:
    x, branch, bias, weight, norm_bias = (
        draw(*shape, seed=seed).double().requires_grad_()
        for seed, shape in enumerate(((3, 5), (3, 5), (5,), (5,), (5,)))
    )
    seed = SEED if p else None

    def run(x: Tensor, branch: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> tuple[Tensor, ...]:
        given = bias if with_bias else None
        total = reference_add_dropout(x, branch, given, p, seed)
        return total, *reference_add_dropout_norm(x, branch, given, p, seed, weight, norm_bias, EPS)

    assert torch.autograd.gradcheck(run, (x, branch, bias, weight, norm_bias))


@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_a_compiled_graph_is_whole(device: torch.device) -> None:
    case = Case((4, 16), PAIRS[0], 0, 0.3, device)
    arguments = case.arguments(norm=True)
    compiled = torch.compile(add_dropout_norm, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*arguments), add_dropout_norm(*arguments), strict=True):
        assert torch.equal(found, expected)
        found.sum().backward(retain_graph=True)


def test_what_is_not_selected_runs_in_pytorch(host_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(library, "call", lambda name, *arguments: calls.append(name))
    library.use_host_library(host_library)
    case = Case((2, 8), PAIRS[0], 0, 0.3, torch.device("cpu"))
    for names in ({"bias_gelu"}, {"add_dropout"}, {"add_dropout_norm"}):
        library.select(names)
        calls.clear()
        add_dropout(*case.arguments(norm=False))
        total, normed = add_dropout_norm(*case.arguments(norm=True))
        assert set(calls) == names & {"add_dropout", "add_dropout_norm"}
    library.select(())
    library.use_host_library(None)
    total, normed = add_dropout_norm(*case.arguments(norm=True))
    assert_near(normed, F.layer_norm(total.double(), (8,), case.weight.double(), case.norm_bias.double()))
