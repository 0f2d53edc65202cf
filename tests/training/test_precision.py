"""float16 trains like float32, and its loss scale changes only what underflows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.files import read_rows
from tests.training.helpers import make_run, make_session, step_batches, train_steps, train_tiny
from training.step import compute_gradients, train_step


def test_a_skipped_step_changes_neither_weights_nor_moments_and_a_loss_scale_no_bit(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    steps = step_batches(session, 0)
    train_step(session, 1, next(steps), 0.01)
    before = {name: value.detach().clone() for name, value in session.parameters.items()}
    batches = next(steps)
    refused = compute_gradients(session, 2, batches)
    assert not refused.taken and math.isfinite(refused.loss)
    for name, value in session.parameters.items():
        assert torch.equal(value, before[name]), name
        assert session.optimizer.state[value]["step"] == 1
    taken = train_step(session, 2, batches, 0.01, scale=2.0**20)  # the gradient of the one before is gone
    assert taken == refused._replace(taken=True, scale=2.0**20)
    steps.close()


@pytest.mark.parametrize(
    ("largest", "muon"), [(0.1, {}), (1e9, {}), (0.1, {"optimizer": "muon", "muon_momentum": 0.5})]
)
def test_the_optimiser_gets_the_gradient_without_the_loss_scale_and_clipped(
    tmp_path: Path, largest: float, muon: dict[str, Any]
) -> None:
    session = make_session(tmp_path, train={"clip_grad": largest, "betas": [0.5, 0.5], **muon})
    norm = train_steps(session, 1, scale=2.0**10)[0].grad_norm
    moments = [session.optimizer.state[value]["exp_avg"].flatten() for value in session.parameters.values()]
    assert norm > 0.2
    assert float(torch.cat(moments).norm()) == pytest.approx(0.5 * min(norm, largest), rel=1e-4)


def test_float16_finds_its_scale_skips_overflows_and_resumes_with_it(tmp_path: Path) -> None:
    train = {"iterations": 30, "save_interval": 10, "initial_loss_scale": 2.0**24, "hysteresis": 1, "lr": 1e-3}
    curves = {}
    for precision in ("float32", "float16"):
        config = make_run(tmp_path / precision, train={**train, "warmup": 0.5, "precision": precision})
        assert train_tiny(config) == 0
        curves[precision] = read_rows(tmp_path / precision / "models/tiny/train.csv")
    skipped = {precision: sum(int(row["skipped"]) for row in rows) for precision, rows in curves.items()}
    assert 3 < skipped["float16"] < 12 and skipped["float32"] == 0
    assert float(curves["float16"][-1]["loss_scale"]) == 2.0 ** (24 - skipped["float16"])
    # a skipped step does not advance the schedule: it has the next one's rate; the last are unused
    rates = {precision: [float(row["learning_rate"]) for row in rows] for precision, rows in curves.items()}
    taken = [rate for rate, row in zip(rates["float16"], curves["float16"], strict=True) if not int(row["skipped"])]
    assert taken == rates["float32"][: -skipped["float16"]]
    losses = {precision: [float(row["lm_loss"] or "nan") for row in rows] for precision, rows in curves.items()}
    # the steps at the start that overflow are of the warm-up: little is lost with them
    assert losses["float16"][-1] == pytest.approx(losses["float32"][-1], rel=0.02)
    assert losses["float16"][-1] < losses["float32"][0] - 0.2

    config = make_run(tmp_path / "resumed", train={**train, "warmup": 0.5, "precision": "float16"})
    folder = tmp_path / "resumed/models/tiny"
    folder.mkdir(parents=True)
    (tmp_path / "float16/models/tiny/iter_0000010").rename(folder / "iter_0000010")
    assert train_tiny(config) == 0
    resumed = read_rows(folder / "train.csv")
    for key in ("lm_loss", "loss_scale", "skipped", "grad_norm", "learning_rate"):
        assert [row[key] for row in resumed] == [row[key] for row in curves["float16"][10:]], key


def test_matrices_are_rounded_once_per_step_whatever_the_number_of_micro_batches(tmp_path: Path) -> None:
    session = make_session(tmp_path, train={"precision": "bfloat16", "micro_batch_size": 1, "global_batch_size": 4})
    matrices = {value.data_ptr() for value in session.parameters.values() if value.dim() > 1}

    class Rounded(TorchDispatchMode):
        inside = before = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.inside += func is torch.ops.aten._to_copy.default and args[0].data_ptr() in matrices
            self.before += func is torch.ops.aten._foreach_copy_.default
            return func(*args, **(kwargs or {}))

    with Rounded() as counted:
        first, second = train_steps(session, 2)
    assert (counted.inside, counted.before) == (0, 2)
    assert second.loss < first.loss  # the second step computes with what the first one learnt
