"""Layouts beyond test_parity.py: masked losses, dropout."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import make_run, on_ranks, open_session, plan_of, train_steps
from training.launch.process_group import World
from training.step import validate

# float32 sums in another order: 1e-7 per step, which the optimiser amplifies; a wrong split: 1e-2
TOLERANCE = 1e-4


def steps(world: World, config: Path) -> dict[str, Any]:
    """Train to the last iteration: losses, gradient norms, validation loss."""
    plan = plan_of(config)
    session = open_session(plan, world)
    found = train_steps(session, plan.experiment.train.iterations)
    valid = validate(session, plan.data.valid, 7)  # samples: no multiple of a batch of 2 over any number of ranks
    return {"loss": [step.loss for step in found], "norm": [step.grad_norm for step in found], "valid": valid}


def run_layouts(folder: Path, parallel: dict[str, Any], *runs: dict[str, Any], dropout: float = 0.0) -> list[Any]:
    """4 steps with each of some `train`: the results by rank."""
    model = {"dropout": dropout, "n_layer": 3}
    configs = [
        make_run(folder / str(number), model=model, parallel=parallel, train=train) for number, train in enumerate(runs)
    ]
    size = math.prod(parallel.get(axis, 1) for axis in ("data", "tensor", "pipeline"))
    return [on_ranks(size, steps, config) for config in configs]


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "tensor": 2, "sequence_parallel": True},
        {"data": 2, "pipeline": 2, "zero_stage": 3},
    ],
)
def test_two_by_two_processes_equal_one_with_separated_documents(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """The numbers of documents and of masked targets differ between ranks and micro-batches."""
    apart = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "recompute": "full"}
    ((single,),) = run_layouts(tmp_path / "1", {}, apart)
    assert single["loss"][0] == pytest.approx(math.log(257), rel=0.02)
    assert single["loss"][-1] < single["loss"][0] - 0.1
    (ranks,) = run_layouts(tmp_path / "4", parallel, apart)
    for seen in ranks:
        for name in ("loss", "valid", "norm"):
            assert seen[name] == pytest.approx(single[name], rel=TOLERANCE), name


def test_dropout_is_repeatable_bit_for_bit_with_and_without_recompute(tmp_path: Path) -> None:
    runs = [{"recompute": kind, "iterations": 2} for kind in ("none", "full")]
    plain, again = run_layouts(tmp_path / "wet", {"tensor": 2}, *runs, dropout=0.2)
    assert [rank["loss"] for rank in plain + again] == [plain[0]["loss"]] * 4
    ((dry,),) = run_layouts(tmp_path / "dry", {}, runs[0])
    assert plain[0]["loss"][1:] != pytest.approx(dry["loss"][1:], rel=TOLERANCE)
