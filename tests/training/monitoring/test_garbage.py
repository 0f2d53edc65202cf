"""Python's garbage collector works in the same iterations on all ranks."""

import gc
from pathlib import Path
from typing import Any

from tests.training.helpers import Patch, make_run, train_tiny
from training import trainer
from training.monitoring import garbage


class Node:
    """An object that reference counts alone never free."""

    def __init__(self) -> None:
        self.itself = self


def test_a_training_collects_at_multiples_of_a_number_and_at_no_other_time(tmp_path: Path, monkeypatch: Patch) -> None:
    collections, seen = list[int](), list[tuple[int, int]]()
    compute_gradients = trainer.compute_gradients

    def step(session: Any, iteration: int, *arguments: Any) -> Any:
        seen.append((iteration, len(collections)))
        assert gc.get_freeze_count() > 1000, "modules are not looked at again"
        for _ in range(20_000):  # far more than Python waits for
            Node()
        return compute_gradients(session, iteration, *arguments)

    def count(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(1)

    monkeypatch.setattr(garbage, "EVERY", 3)
    monkeypatch.setattr(trainer, "compute_gradients", step)
    gc.callbacks.append(count)
    try:
        assert train_tiny(make_run(tmp_path), "train.iterations=7") == 0
    finally:
        gc.callbacks.remove(count)
    before = seen[0][1]
    assert [(iteration, number - before) for iteration, number in seen] == [
        *((iteration, 0) for iteration in (1, 2)),
        *((iteration, 1) for iteration in (3, 4, 5)),
        *((iteration, 2) for iteration in (6, 7)),
    ]
    assert gc.isenabled() and gc.get_freeze_count() == 0
