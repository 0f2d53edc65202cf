"""Layouts beyond test_parity.py: masked losses, dropout, a change of layout between two starts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import ALONE, launch_ok, make_run
from tests.training.worker import steps

# float32 sums in another order: 1e-7 a step, which the optimiser amplifies; a wrong split is off by 1e-2 and more
TOLERANCE = 1e-4


def run_layout(
    folder: Path, parallel: dict[str, Any], save_at: int = 0, dropout: float = 0.0, **train: object
) -> list[dict[str, Any]]:
    """4 steps: the results by rank, in a new folder or one that already holds a checkpoint."""
    config = make_run(folder, model={"dropout": dropout, "n_layer": 3}, parallel=parallel, train=train)
    size = parallel.get("pipeline", 1) * parallel.get("data", 1) * parallel.get("tensor", 1)
    if size == 1:
        return [steps(config, ALONE, save_at)]
    launch_ok(size, "tests.training.worker", config, folder / "seen", "--save-at", save_at)
    return [json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(size)]


def assert_same_course(seen: dict[str, Any], expected: dict[str, Any], first: int = 0) -> None:
    assert seen["loss"] == pytest.approx(expected["loss"][first:], rel=TOLERANCE)
    assert seen["valid"] == pytest.approx(expected["valid"], rel=TOLERANCE)
    assert seen["norm"] == pytest.approx(expected["norm"][first:], rel=TOLERANCE)


def test_two_by_two_processes_equal_one_with_separated_documents(tmp_path: Path) -> None:
    """The number of masked targets differs between ranks and micro-batches."""
    apart = {"reset_position_ids": True, "eod_mask_loss": True}
    (single,) = run_layout(tmp_path / "1", {}, **apart)
    assert single["loss"][0] == pytest.approx(math.log(257), rel=0.02)
    assert single["loss"][-1] < single["loss"][0] - 0.1
    for seen in run_layout(tmp_path / "4", {"data": 2, "tensor": 2, "sequence_parallel": True}, **apart):
        assert_same_course(seen, single)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tensor": 2, "pipeline": 2, "sequence_parallel": True}, {"data": 2, "zero_stage": 3}),
        pytest.param({"data": 2, "zero_stage": 1}, {"tensor": 4, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=["four ranks to two", "two ranks to eight"],
)
def test_a_checkpoint_continues_on_any_other_layout(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Includes the optimiser's moments and the padded embedding: 257 rows are 384 on one rank and 512 on two."""
    (single,) = run_layout(tmp_path / "single", {})
    run_layout(tmp_path / "start", first, save_at=2)
    for number, layout in enumerate(({}, second)):
        folder = tmp_path / str(number)
        shutil.copytree(*(part / "models" / "tiny" / "iter_0000002" for part in (tmp_path / "start", folder)))
        for seen in run_layout(folder, layout):
            assert len(seen["loss"]) == 2
            assert_same_course(seen, single, first=2)


def test_dropout_is_repeatable_bit_for_bit_with_and_without_recompute(tmp_path: Path) -> None:
    courses = []
    for kind in ("none", "full"):
        seen = run_layout(tmp_path / kind, {"tensor": 2}, dropout=0.2, recompute=kind, iterations=2)
        assert all(rank["loss"] == seen[0]["loss"] for rank in seen)
        courses.append(seen[0]["loss"])
    assert courses[0] == courses[1]
    dry = run_layout(tmp_path / "dry", {}, iterations=2)[0]["loss"]
    assert courses[0][1:] != pytest.approx(dry[1:], rel=TOLERANCE)
