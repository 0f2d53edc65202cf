"""The trainer with every kernel selected takes the steps that it takes without any."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import Session, make_run, open_session, settings_of, step_batches
from training.kernels import choice, library
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step


def steps(folder: Path, device: torch.device, dropout: float = 0.0, **train: Any) -> tuple[list[float], Session]:
    """The losses of three steps, and the session after them."""
    config = make_run(folder, model={"dropout": dropout}, train={"compile": "none", **train})
    session = open_session(make_plan(settings_of(config), "tiny"), World(0, 1, device))
    batches = step_batches(session, 0)
    losses = [train_step(session, iteration, next(batches), 0.01).loss for iteration in (1, 2, 3)]
    batches.close()
    return losses, session


@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_steps_with_all_kernels_are_the_steps_without(
    tmp_path: Path, device: torch.device, precision: str, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()
    call = library.call

    def note(name: str, *arguments: Any) -> None:
        called.add(name)
        call(name, *arguments)

    monkeypatch.setattr(library, "call", note)
    with library.using(()):
        expected, plain = steps(tmp_path / "plain", device, precision=precision)
    assert not called
    with library.using(choice.KERNELS):
        found, ours = steps(tmp_path / "ours", device, precision=precision)
    assert {"cross_entropy_backward", "causal_softmax_backward", "bias_gelu_backward"} < called
    assert {"add_dropout", "add_dropout_norm", "sum_of_squares", "adamw"} < called
    assert found == pytest.approx(expected, rel=near)
    if precision == "float32":
        for name, value in ours.parameters.items():
            assert torch.allclose(value, plain.parameters[name], atol=2e-4), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputed_layer_draws_the_same_mask(tmp_path: Path, device: torch.device, recompute: str) -> None:
    with library.using(set(choice.KERNELS) - {"causal_softmax"}):
        plain, _ = steps(tmp_path / "plain", device, dropout=0.1)
        again, _ = steps(tmp_path / "again", device, dropout=0.1, recompute=recompute)
    assert again == plain
