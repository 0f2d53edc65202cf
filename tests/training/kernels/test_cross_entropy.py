"""The cross-entropy kernels against float64, on every part of a vocabulary, and their fallback."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.kernels.helpers import DTYPES, assert_margins_untouched, assert_near, place
from training.kernels import cross_entropy, library
from training.kernels.cross_entropy import IGNORED, reference_backward_, reference_statistics

# (N, V, first, rows): one column, less than a pack, tails, padding, a later part, a part that is all padding
SIZES = ((1, 1, 0, 1), (3, 7, 0, 7), (4, 1024, 0, 1017), (2, 2051, 100, 2049), (5, 4096, 4096, 4090), (2, 64, 128, 0))


def make(n: int, v: int, first: int, rows: int, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits (N, V) with NaN in the padding columns, and targets, some of them elsewhere."""
    generator = torch.Generator().manual_seed(n * v + first)
    logits = torch.randn(n, v, generator=generator) * scale
    logits[:, rows:] = torch.nan
    targets = torch.randint(max(first - 2, 0), first + v + 2, (n,), generator=generator)
    targets[0] = first + rows - 1
    targets[n // 2] = IGNORED if n > 2 else targets[n // 2]
    return logits, targets


@pytest.mark.parametrize(("size", "dtype", "offset"), [*product(SIZES, DTYPES, (0, 1))])
def test_the_kernels_agree_with_float64(
    size: tuple[int, int, int, int], dtype: torch.dtype, offset: int, device: torch.device
) -> None:
    n, v, first, rows = size
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


def test_the_statistics_are_those_of_pytorchs_cross_entropy(device: torch.device) -> None:
    logits, targets = make(6, 300, 0, 300)
    targets = torch.where(targets >= 300, IGNORED, targets)
    expected_gradient = torch.autograd.functional.jacobian(
        lambda x: F.cross_entropy(x, targets, reduction="sum"), logits.double()
    )
    found = cross_entropy.statistics(logits.to(device), targets.to(device), 0, 300).cpu()
    log_sum_exp = found[:, 0] + found[:, 1].log()
    losses = torch.where(targets == IGNORED, 0, log_sum_exp - found[:, 2])
    assert_near(losses, F.cross_entropy(logits.double(), targets, reduction="none"), absolute=1e-5)
    on_device = logits.to(device, copy=True)
    cross_entropy.backward_(on_device, targets.to(device), log_sum_exp.to(device), torch.ones(6, device=device), 0, 300)
    assert_near(on_device, expected_gradient)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows_in_the_sum(bad: float, device: torch.device) -> None:
    logits, targets = make(2, 100, 0, 100)
    logits[1, 50] = bad
    found = cross_entropy.statistics(logits.to(device), targets.to(device), 0, 100)
    assert found[0].isfinite().all() and found[1, 1].isnan()


def test_large_and_masked_logits_stay_finite(device: torch.device) -> None:
    logits = torch.full((2, 40), -torch.inf)
    logits[1, 3] = 3e38
    found = cross_entropy.statistics(logits.to(device), torch.tensor([0, 3], device=device), 0, 40).cpu()
    assert found[0, 1] == 0 and found[0, 0] == torch.finfo(torch.float32).min
    assert found[1].tolist() == pytest.approx([3e38, 1, 3e38])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_ops_are_well_behaved(device: torch.device) -> None:
    logits, targets = (tensor.to(device) for tensor in make(3, 9, 0, 9))
    vector = torch.ones(3, device=device)
    torch.library.opcheck(torch.ops.gpt2.cross_entropy_statistics.default, (logits, targets, 0, 9))
    torch.library.opcheck(torch.ops.gpt2.cross_entropy_backward_.default, (logits, targets, vector, vector, 0, 9))


def test_what_is_not_selected_runs_in_pytorch(host_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(library, "call", lambda name, *arguments: calls.append(name))
    logits, targets = make(3, 9, 0, 9)
    vector = torch.ones(3)

    def run(values: Tensor) -> list[str]:
        calls.clear()
        cross_entropy.statistics(values, targets, 0, 9)
        cross_entropy.backward_(values, targets, vector, vector, 0, 9)
        return calls

    library.select({"cross_entropy"})
    assert run(logits) == []  # no library
    library.use_host_library(host_library)
    assert run(logits) == ["cross_entropy_statistics", "cross_entropy_backward"]
    assert run(logits.double()) == []
    library.select({"softmax"})
    assert run(logits) == []
    library.select(())
    library.use_host_library(None)
