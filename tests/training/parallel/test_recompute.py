"""Recomputed layers give the same step."""

from pathlib import Path

from tests.training.helpers import make_session, step_batches
from training.step import train_step


def course(folder: Path, **train: object) -> list[float]:
    """The losses of three steps."""
    session = make_session(folder, model={"dropout": 0.1}, train=train)
    batches = step_batches(session, 0)
    return [train_step(session, iteration, next(batches), 0.01).loss for iteration in (1, 2, 3)]


def test_a_step_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain = course(tmp_path / "none")
    for kind in ("selective", "full"):
        assert course(tmp_path / kind, recompute=kind) == plain
