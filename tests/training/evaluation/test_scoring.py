"""Validation has no side effects, and the precision is the requested one."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import make_run, open_session, settings_of, step_batches
from training.evaluation.scoring import sum_of_losses
from training.inference.load import model_from_weights
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step, validate

ALONE = World(0, 1, torch.device("cpu"))


def losses(config: Path, validates: bool) -> list[float]:
    session = open_session(make_plan(settings_of(config), "tiny"), ALONE)
    seen = []
    steps = step_batches(session, 0)
    for iteration in (1, 2, 3):
        seen.append(train_step(session, iteration, next(steps), 0.01).loss)
        if validates:
            validate(session, session.plan.data.valid, 5)
    return seen


def test_validation_does_not_change_later_steps(tmp_path: Path) -> None:
    config = make_run(tmp_path)  # dropout on
    assert losses(config, validates=True) == losses(config, validates=False)


def test_validation_does_not_depend_on_how_its_samples_are_batched(tmp_path: Path) -> None:
    """11 samples are not a multiple of the global batch of 8 or of the micro-batch of 4."""
    seen = []
    for micro in (2, 4):
        plan = make_plan(settings_of(make_run(tmp_path / str(micro), train={"micro_batch_size": micro})), "tiny")
        seen.append(validate(open_session(plan, ALONE), plan.data.valid, 11))
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    settings = plan.experiment.model
    weights = {name: value.detach() for name, value in open_session(plan, ALONE).parameters.items()}
    weights["wte.weight"] = weights["wte.weight"][: settings.vocab_size]
    model = model_from_weights(settings, weights)
    assert seen[0] == pytest.approx(sum_of_losses(model, plan.data.valid, range(11), 3) / (11 * 16), rel=1e-6)


def test_bfloat16_is_near_float32_and_auto_is_float32_on_a_cpu(tmp_path: Path) -> None:
    plain, auto, half = (
        losses(make_run(tmp_path / precision, train={"precision": precision}), validates=False)
        for precision in ("float32", "auto", "bfloat16")
    )
    assert auto == plain
    assert half != plain
    assert half == pytest.approx(plain, rel=0.01)
