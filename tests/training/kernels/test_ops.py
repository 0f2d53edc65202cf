"""The trainer with every kernel selected takes the steps that it takes without any; ops follow the selection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import Session, make_run, open_session, settings_of, step_batches
from tests.training.kernels.test_cases import SMALL
from tests.training.parity import TOLERANCE, weights_difference
from training.kernels import library
from training.kernels.cases import cases, runner
from training.launch.process_group import World
from training.planning.run import make_plan
from training.step import train_step


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
