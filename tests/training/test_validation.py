"""Validation disturbs nothing, and precision is what was asked for."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import make_run, settings_of
from training.distributed import World
from training.loop import open_session, step_batches, train_step
from training.plan import make_plan
from training.validation import autocast, mean_loss, validation_samples

ALONE = World(0, 1, torch.device("cpu"))


def losses(config: Path, validate: bool) -> list[float]:
    session = open_session(make_plan(settings_of(config), "tiny"), ALONE)
    seen = []
    steps = step_batches(session, 0)
    for iteration in (1, 2, 3):
        seen.append(float(train_step(session, iteration, next(steps), 0.01)[0]))
        if validate:
            mean_loss(session.model, session.plan.valid, 5, 2, "float32", session.plan.form)
    return seen


def test_a_validation_run_changes_nothing_that_follows(tmp_path: Path) -> None:
    config = make_run(tmp_path)  # dropout on
    assert losses(config, validate=True) == losses(config, validate=False)


def test_validation_is_repeatable_and_takes_the_whole_part_at_most(tmp_path: Path) -> None:
    plan = make_plan(settings_of(make_run(tmp_path, train={"eval_batches": 1000})), "tiny")
    assert validation_samples(plan.valid, plan.run.train) == plan.valid.per_epoch
    session = open_session(plan, ALONE)
    first, second = (mean_loss(session.model, plan.valid, 5, batch, "float32", plan.form) for batch in (2, 5))
    assert first == pytest.approx(second, rel=1e-6)


def test_bfloat16_is_near_float32_and_auto_is_float32_on_a_cpu(tmp_path: Path) -> None:
    plain, auto, half = (
        losses(make_run(tmp_path / precision, train={"precision": precision}), validate=False)
        for precision in ("float32", "auto", "bfloat16")
    )
    assert auto == plain
    assert half != plain
    assert half == pytest.approx(plain, rel=0.01)
    with autocast("bfloat16", torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
