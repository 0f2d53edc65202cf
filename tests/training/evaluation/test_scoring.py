"""Validation has no side effects, and the precision is the requested one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.training.helpers import make_session, step_batches
from training.inference.load import model_from_weights
from training.step import train_step, validate


def losses(folder: Path, validates: bool = False, **train: Any) -> list[float]:
    """The losses of three steps, with dropout."""
    session = make_session(folder, train=train)
    seen = []
    steps = step_batches(session, 0)
    for iteration in (1, 2, 3):
        seen.append(train_step(session, iteration, next(steps), 0.01).loss)
        if validates:
            validate(session, session.plan.data.valid, 5)
    return seen


def test_validation_does_not_change_later_steps_and_bfloat16_is_near_float32(tmp_path: Path) -> None:
    plain = losses(tmp_path, precision="float32")
    assert losses(tmp_path, validates=True, precision="auto") == plain  # float32 on a CPU
    half = losses(tmp_path, precision="bfloat16")
    assert half != plain and half == pytest.approx(plain, rel=0.01)


def test_validation_scores_the_samples_asked_for_however_they_are_batched(tmp_path: Path) -> None:
    """11 samples are not a multiple of the global batch of 8 or of the micro-batch of 4."""
    for micro in (2, 4):
        session = make_session(tmp_path / str(micro), train={"micro_batch_size": micro})
        found, settings = validate(session, session.plan.data.valid, 11), session.experiment.model
        weights = {name: value.detach() for name, value in session.parameters.items()}
        weights["wte.weight"] = weights["wte.weight"][: settings.vocab_size]
        model = model_from_weights(settings, weights)
        tokens = torch.stack([torch.from_numpy(session.plan.data.valid.sample(number)) for number in range(11)])
        expected = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        assert found == pytest.approx(float(expected.detach()), rel=1e-6)
