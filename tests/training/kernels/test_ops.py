"""The trainer takes the same steps with all kernels as with none; GELU and heads in float64."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from tests.numerics import assert_close, tolerance
from tests.training.helpers import Session, make_run, open_session, settings_of, step_batches
from tests.training.kernels.conftest import run_backwards
from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, draw, offsets, place, some_examples
from tests.training.parity import TOLERANCE, weights_difference
from training.kernels import library
from training.kernels.cases import Shapes, cases, runner, verify
from training.kernels.ops import bias_gelu, heads_of, split_heads
from training.launch.process_group import World
from training.planning.run import make_plan
from training.step import train_step

SMALL = Shapes(samples=2, seq_len=24, n_layer=2, n_embd=32, vocabulary=96, dropout=0.1, dtype="float32")
GELU = 10 * 5**2  # ten roundings, magnified by tanh's argument, which is up to 5 where its slope is not 0


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The launchers that are called."""
    names: set[str] = set()
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, *arguments: (names.add(name), call(name, *arguments))[1])
    yield names


def steps(folder: Path, device: torch.device, dropout: float = 0.0, **train: Any) -> tuple[list[float], Session]:
    """The losses of two steps, and the session after them."""
    train = {"compile": "none", "global_batch_size": 2, **train}
    config = make_run(folder, model={"dropout": dropout, "n_layer": 1}, train=train)
    session = open_session(make_plan(settings_of(config), "tiny"), World(0, 1, device))
    batches = step_batches(session, 0)
    losses = [train_step(session, iteration, next(batches), 0.01).loss for iteration in (1, 2)]
    batches.close()
    return losses, session


def test_steps_with_all_kernels_are_the_steps_without(tmp_path: Path, device: torch.device, called: set[str]) -> None:
    with library.using(()):
        expected, plain = steps(tmp_path / "plain", device)
    assert not called
    with library.using(library.KERNELS):
        found, ours = steps(tmp_path / "ours", device)
    assert {"bias_gelu_backward", "add_dropout_norm", "sum_of_squares", "adamw"} < called
    assert found == pytest.approx(expected, rel=1e-5)
    assert weights_difference(ours.parameters, plain.parameters) <= TOLERANCE["weights"]


def test_a_recomputed_layer_draws_the_same_mask(tmp_path: Path, device: torch.device) -> None:
    plain, _ = steps(tmp_path / "plain", device, dropout=0.1)
    again, _ = steps(tmp_path / "again", device, dropout=0.1, recompute="full")
    assert again == plain


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_has_a_case_in_which_it_agrees_with_pytorch(dtype: str, device: torch.device) -> None:
    every = list(cases(replace(SMALL, dtype=dtype), device))
    assert tuple(case.kernel for case in every) == library.KERNELS
    for case in every:
        verify(case)


def test_an_op_runs_its_own_kernel_where_it_is_selected_and_takes_its_type(
    device: torch.device, called: set[str]
) -> None:
    for case in cases(SMALL, device):
        for names, uses in ({case.kernel}, True), (set(library.KERNELS) - {case.kernel}, False):
            called.clear()
            with library.using(names):
                runner(case, case.forward)()
                assert bool(called) == uses, (case.kernel, called)
                assert uses == library.selected(case.kernel, torch.zeros(1, device=device))
                assert not library.selected(case.kernel, torch.zeros(1, device=device, dtype=torch.float64))
                assert not library.selected(case.kernel, torch.zeros(1, device="meta"))


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
def test_gelu_agrees_with_float64(
    rows: int, columns: int, dtype: torch.dtype, offset: int, backwards: bool, device: torch.device
) -> None:
    run_backwards(backwards)
    x = place(3 * draw(rows, columns, seed=1), device, dtype, offset).requires_grad_()
    bias = place(3 * draw(columns, seed=2), device, dtype, offset).requires_grad_()
    gradient = place(3 * draw(rows, columns, seed=3), device, dtype, offset)
    exact_x, exact_bias = (tensor.detach().double().cpu().requires_grad_() for tensor in (x, bias))
    found, expected = bias_gelu(x, bias), F.gelu(exact_x + exact_bias, approximate="tanh")
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
