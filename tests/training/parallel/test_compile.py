"""A compiled step has no graph break in any layout, and no part of it silently runs eagerly."""

import json
import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.training.compile_worker import STEPS
from tests.training.helpers import launch_ok, make_run

LAYERS, MICRO_BATCHES = 3, 8  # of a global batch of 16 samples, before they are shared by data-parallel ranks
RECOMPUTE, DROPOUT = ("none", "selective", "full"), (0.0, 0.1)


@dataclass(frozen=True)
class Case:
    """A layout and what is compiled in it."""

    tensor: int = 1
    sequence_parallel: bool = False
    data: int = 1
    zero_stage: int = 0
    pipeline: int = 1
    recompute: str = "none"
    dropout: float = 0.0
    compile: str = "blocks"
    loss: str = "whole"
    precision: str = "float32"

    @property
    def processes(self) -> int:
        return self.tensor * self.data * self.pipeline

    def __str__(self) -> str:
        plain = asdict(Case())
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != plain[key]) or "single"

    def write(self, folder: Path) -> None:
        values = asdict(self)
        parallel = {key: values.pop(key) for key in ("tensor", "sequence_parallel", "data", "zero_stage", "pipeline")}
        model = {"n_layer": LAYERS, "dropout": values.pop("dropout")}
        make_run(folder, model=model, parallel=parallel, train={**values, "global_batch_size": 2 * MICRO_BATCHES})

    def runs(self, rank: int, steps: int) -> list[int]:
        """How often each graph of a rank must run in some steps: one graph for all layers."""
        passes = steps * MICRO_BATCHES // self.data
        if self.compile == "model":
            return [passes]
        stage = rank * self.pipeline // self.processes
        layers = [-(-LAYERS * edge // self.pipeline) for edge in (stage, stage + 1)]
        edges = (stage == 0) + (stage == self.pipeline - 1)  # embedding, loss
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
    near = 1e-5 if case.precision == "float32" else 1e-2
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


def test_the_hardest_layout_compiles_whole(tmp_path: Path) -> None:
    check([Case(tensor=2, sequence_parallel=True, recompute="selective")], tmp_path)


_CHOICES = list(product(RECOMPUTE, DROPOUT))
TABLE = {
    "single": [Case(recompute=kind, dropout=share, compile="model") for kind, share in _CHOICES],
    "tensor": [Case(2, False, 1, 0, 1, *choice, mode) for choice in _CHOICES for mode in ("blocks", "model")],
    "sequence": [Case(2, True, 1, 0, 1, *choice, mode) for choice in _CHOICES for mode in ("blocks", "model")],
    "zero 0, 1": [Case(1, False, 2, stage, 1, *choice) for stage in (0, 1) for choice in _CHOICES],
    "zero 2, 3": [Case(1, False, 2, stage, 1, *choice) for stage in (2, 3) for choice in _CHOICES],
    "others": [
        Case(tensor=2, loss="chunked"),
        Case(tensor=2, sequence_parallel=True, recompute="full", precision="bfloat16", loss="chunked"),
        Case(data=2, zero_stage=3, recompute="full", precision="bfloat16"),
        Case(data=2, zero_stage=2, precision="float16"),
        Case(pipeline=2, recompute="selective", dropout=0.1),
        Case(pipeline=2, recompute="full", compile="model"),
    ],
    "four": [
        Case(tensor=2, sequence_parallel=True, data=2, zero_stage=3, recompute="selective"),
        Case(tensor=2, sequence_parallel=True, pipeline=2, recompute="full", dropout=0.1),
        Case(tensor=2, data=2, zero_stage=2, recompute="selective", dropout=0.1, precision="bfloat16"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("group", TABLE)
def test_every_layout_compiles_whole(tmp_path: Path, group: str) -> None:
    check(TABLE[group], tmp_path)
