"""Recomputed layers and compiled ones give the same step."""

from pathlib import Path

import torch

from tests.training.helpers import make_run, open_session, settings_of, step_batches
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step

ALONE = World(0, 1, torch.device("cpu"))


def course(folder: Path, dropout: float = 0.1, **train: object) -> list[float]:
    """The losses of three steps."""
    config = make_run(folder, model={"dropout": dropout}, train=train)
    session = open_session(make_plan(settings_of(config), "tiny"), ALONE)
    batches = step_batches(session, 0)
    return [train_step(session, iteration, next(batches), 0.01).loss for iteration in (1, 2, 3)]


def test_a_step_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain = course(tmp_path / "none")
    for kind in ("selective", "full"):
        assert course(tmp_path / kind, recompute=kind) == plain
