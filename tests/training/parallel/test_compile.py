"""A compiled step has no graph break in any layout, and no part of it silently runs eagerly."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.training.compile_worker import STEPS
from tests.training.helpers import launch_ok, make_run

LAYERS, MICRO_BATCHES = 3, 8  # of a global batch of 16 samples, before they are shared by data-parallel ranks


@dataclass(frozen=True)
class Case:
    """A layout and what is compiled in it."""

    parallel: dict[str, Any]
    recompute: str = "selective"
    dropout: float = 0.0
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return math.prod(self.parallel.get(axis, 1) for axis in ("tensor", "data", "pipeline"))

    def write(self, folder: Path) -> None:
        train = {"recompute": self.recompute, "compile": "blocks", **self.train}
        model = {"n_layer": LAYERS, "dropout": self.dropout}
        make_run(folder, model=model, parallel=self.parallel, train={"global_batch_size": 2 * MICRO_BATCHES, **train})

    def runs(self, rank: int, steps: int) -> list[int]:
        """How often each graph of a rank must run in some steps: one graph for all layers."""
        passes, pipeline = steps * MICRO_BATCHES // self.parallel.get("data", 1), self.parallel.get("pipeline", 1)
        if self.train.get("compile") == "model":
            return [passes]
        stage = rank * pipeline // self.processes
        layers = [-(-LAYERS * edge // pipeline) for edge in (stage, stage + 1)]
        edges = (stage == 0) + (stage == pipeline - 1)  # embedding, loss
        return sorted([passes] * edges + [passes * (layers[1] - layers[0])])


def problems(case: Case, rank: int, eager: dict[str, Any], compiled: dict[str, Any]) -> list[str]:
    """What a rank's compiled course did wrong."""
    found = [f"graph break: {reason}" for reason in compiled["breaks"]]
    found += [f"{name} differs between ranks: they drew other masks" for name in compiled["drifted"]]
    if compiled["skipped frames"]:
        found.append(f"{compiled['skipped frames']} frames fell back to eager")
    for part, steps in (("train", STEPS), ("valid", 1)):
        if compiled[f"{part} graphs"] != case.runs(rank, steps):
            found.append(f"{part}: graphs ran {compiled[f'{part} graphs']}, not {case.runs(rank, steps)} times")
    near = 1e-2 if "precision" in case.train else 1e-5
    numbers = [(course["valid"], *course["train"][0], *course["train"][1]) for course in (eager, compiled)]
    if case.dropout == 0 and numbers[1] != pytest.approx(numbers[0], rel=near):
        found.append(f"{numbers[1]} differ from eager {numbers[0]}")
    if not all(map(math.isfinite, numbers[1])):
        found.append("not finite")
    return found


def check(cases: list[Case], folder: Path) -> None:
    """Compare all cases with their eager courses; they run in one job."""
    for number, case in enumerate(cases):
        case.write(folder / f"{number:03}")
    launch_ok(cases[0].processes, "tests.training.compile_worker", folder, timeout=550)
    wrong = []
    for number, case in enumerate(cases):
        for rank in range(case.processes):
            seen = json.loads((folder / f"{number:03}" / f"seen.{rank}.json").read_text())
            wrong += [f"{case}, rank {rank}: {problem}" for problem in problems(case, rank, **seen)]
    assert not wrong, "\n".join(wrong)


SEQUENCE = {"tensor": 2, "sequence_parallel": True}
ZERO_3 = {"data": 2, "zero_stage": 3}


def test_the_hardest_layout_compiles_whole(tmp_path: Path) -> None:
    check([Case(SEQUENCE)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [Case({}, kind, 0.1, {"compile": "model"}) for kind in ("none", "selective", "full")],
        [Case(SEQUENCE, "full", 0.1, {"compile": mode}) for mode in ("blocks", "model")],
        [Case({"data": 2, "zero_stage": stage}, "full") for stage in range(4)],
        [Case({"pipeline": 2}, dropout=0.1), Case({"pipeline": 2}, "full", 0.0, {"compile": "model"})],
        [Case(SEQUENCE, "full", 0.0, {"precision": "bfloat16", "loss": "chunked"})],
        [Case({**SEQUENCE, **ZERO_3}), Case({**SEQUENCE, "pipeline": 2}, "full", 0.1)],
    ],
    ids=["single", "sequence", "zero", "pipeline", "precision", "four ranks"],
)
def test_every_layout_compiles_whole(tmp_path: Path, cases: list[Case]) -> None:
    check(cases, tmp_path)
