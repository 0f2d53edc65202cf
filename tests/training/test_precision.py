"""float16 trains like float32, and its loss scale changes only what underflows."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import read_rows
from tests.training.helpers import (
    Session,
    launch_ok,
    make_run,
    open_session,
    run_main,
    settings_of,
    step_batches,
)
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step
from training.train import main

ALONE = World(0, 1, torch.device("cpu"))


def session_of(folder: Path, **train: Any) -> Session:
    return open_session(make_plan(settings_of(make_run(folder, train=train)), "tiny"), ALONE)


def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit_of_a_float32_step(tmp_path: Path) -> None:
    weights = []
    for scale in (1.0, 2.0**20):
        session = session_of(tmp_path / str(scale))
        steps = step_batches(session, 0)
        seen = [train_step(session, iteration, next(steps), 0.01, scale) for iteration in (1, 2, 3)]
        weights.append((seen, {name: value.detach().clone() for name, value in session.parameters.items()}))
        steps.close()
    assert weights[0][0] == weights[1][0]
    for name, value in weights[0][1].items():
        assert torch.equal(value, weights[1][1][name]), name


def test_a_skipped_step_changes_neither_weights_nor_moments(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    steps = step_batches(session, 0)
    train_step(session, 1, next(steps), 0.01)
    before = {name: value.detach().clone() for name, value in session.parameters.items()}
    batches = next(steps)
    refused = train_step(session, 2, batches, 0.01, accepts=lambda loss, norm: False)
    assert not refused.taken and math.isfinite(refused.loss)
    for name, value in session.parameters.items():
        assert torch.equal(value, before[name]), name
        assert session.optimizer.state[value]["step"] == 1
    taken = train_step(session, 2, batches, 0.01)  # the gradient of the one before is gone
    assert taken == refused._replace(taken=True)
    steps.close()


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "auto"])
def test_activations_have_the_configured_type_and_parameters_and_loss_are_float32(
    tmp_path: Path, precision: str
) -> None:
    session = session_of(tmp_path, precision=precision)
    (stage,) = session.stages
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str, _module: object, _inputs: object, output: Any) -> None:
        seen[name] = {output.dtype} if isinstance(output, torch.Tensor) else {part.dtype for part in output}

    for name, module in stage.model.named_modules():
        if name.startswith("h.0.") and not list(module.children()):
            module.register_forward_hook(partial(note, name))
    (batch,) = next(step_batches(session, 0))[:1]
    loss = stage(batch.tokens, batch.positions, batch.targets)
    loss.backward()
    wanted = torch.float32 if precision == "auto" else getattr(torch, precision)
    assert len(seen) >= 7 and set.union(*seen.values()) == {wanted}
    assert {value.dtype for value in session.parameters.values()} == {torch.float32}
    assert {value.grad.dtype for value in session.parameters.values()} == {torch.float32} == {loss.dtype}


def test_float16_finds_its_scale_skips_overflows_and_follows_float32(tmp_path: Path) -> None:
    train = {"iterations": 30, "initial_loss_scale": 2.0**24, "hysteresis": 1, "lr": 1e-3, "warmup": 0.5}
    curves = {}
    for precision in ("float32", "float16"):
        config = make_run(tmp_path / precision, train={**train, "precision": precision})
        assert run_main(main, "--config", config, "--model", "tiny") == 0
        curves[precision] = read_rows(tmp_path / precision / "models/tiny/train.csv")
    skipped = {precision: sum(int(row["skipped"]) for row in rows) for precision, rows in curves.items()}
    assert 3 < skipped["float16"] < 12 and skipped["float32"] == 0
    assert float(curves["float16"][-1]["loss_scale"]) == 2.0 ** (24 - skipped["float16"])
    # a skipped step does not advance the schedule: its rate is that of the next one, and the last rates are not reached
    rates = {precision: [float(row["learning_rate"]) for row in rows] for precision, rows in curves.items()}
    taken = [rate for rate, row in zip(rates["float16"], curves["float16"], strict=True) if not int(row["skipped"])]
    assert taken == rates["float32"][: -skipped["float16"]]
    losses = {precision: [float(row["lm_loss"] or "nan") for row in rows] for precision, rows in curves.items()}
    # the steps at the start that overflow are of the warm-up: little is lost with them
    assert losses["float16"][-1] == pytest.approx(losses["float32"][-1], rel=0.02)
    assert losses["float16"][-1] < losses["float32"][0] - 0.2


def test_a_resumed_float16_run_continues_with_the_same_loss_scale(tmp_path: Path) -> None:
    train = {"iterations": 12, "save_interval": 6, "precision": "float16", "initial_loss_scale": 2.0**22}
    configs = [make_run(tmp_path / name, model={"dropout": 0.1}, train=train) for name in ("straight", "resumed")]
    assert run_main(main, "--config", configs[0], "--model", "tiny") == 0
    straight, folder = (tmp_path / name / "models/tiny" for name in ("straight", "resumed"))
    folder.mkdir(parents=True)
    (straight / "iter_0000006").rename(folder / "iter_0000006")
    assert run_main(main, "--config", configs[1], "--model", "tiny") == 0
    rows, resumed = read_rows(straight / "train.csv"), read_rows(folder / "train.csv")
    assert any(int(row["skipped"]) for row in rows[:6])
    for key in ("lm_loss", "loss_scale", "skipped", "grad_norm", "learning_rate"):
        assert [row[key] for row in resumed] == [row[key] for row in rows[6:]], key


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2, "data": 2, "zero_stage": 1},
        pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "sequence_parallel": True, "data": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_one_number_that_overflows_on_one_rank_skips_the_step_on_all_axes(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    config = make_run(tmp_path, parallel=parallel, train={"precision": "float16", "initial_loss_scale": 256})
    for result in launch_ok(4, "tests.training.spoiler", config, "gradient"):
        assert result.stdout == "taken False, untouched True\n"
