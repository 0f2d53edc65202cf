"""The planner knows exactly which parameters a rank holds."""

import math
from typing import Any

import pytest

from common.settings import ModelSettings
from tests.training.planning.cases import planned
from tests.training.planning.simulated_step import run_worker
from training.planning.layout import Layout
from training.planning.shards import held, layer_shapes, rank_parameters, root_shapes

GPT2_345M = ModelSettings(n_layer=24, n_head=16, n_embd=1024)
ODD = {"n_layer": 5, "n_head": 6, "n_embd": 42, "seq_len": 18, "vocab_size": 257}  # FSDP's shards are uneven

LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # parallel, train
    ({}, {}),
    ({"tensor": 2}, {}),
    ({"tensor": 3, "sequence_parallel": True}, {}),
    ({"pipeline": 2}, {"accumulation": 2}),
    ({"pipeline": 3, "schedule": "gpipe"}, {"accumulation": 2}),
    ({"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, {"accumulation": 2}),
    ({"data": 4, "zero_stage": 0}, {}),
    ({"data": 4, "zero_stage": 1}, {"accumulation": 2}),
    ({"data": 3, "zero_stage": 2}, {"accumulation": 2}),
    ({"data": 5, "zero_stage": 3}, {}),
    ({"tensor": 2, "data": 4, "zero_stage": 1}, {}),
    ({"tensor": 2, "sequence_parallel": True, "data": 2, "zero_stage": 3}, {}),
    ({"pipeline": 2, "data": 3, "zero_stage": 1}, {"accumulation": 2}),
    ({"tensor": 2, "sequence_parallel": True, "pipeline": 2, "data": 2, "zero_stage": 2}, {"accumulation": 4}),
    ({"pipeline": 5, "data": 2, "zero_stage": 0}, {"accumulation": 5}),
]


def test_a_rank_holds_the_known_numbers_of_parameters() -> None:
    assert rank_parameters(GPT2_345M, Layout()) == 354_871_296  # 50,304 rows
    assert rank_parameters(GPT2_345M, Layout(tensor=2)) == 178_100_224  # 50,432 rows
    assert GPT2_345M.parameters == 354_823_168  # 50,257 rows
    large = ModelSettings(n_layer=32, n_head=32, n_embd=4096, seq_len=2048)
    assert round(large.parameters / 1e9, 3) == 6.658
    assert round(ModelSettings(n_layer=48, n_head=64, n_embd=6144, seq_len=2048).parameters / 1e9, 1) == 22.1


def test_parameters_gradients_and_moments_are_as_large_as_the_trainer_allocates() -> None:
    train = {"micro_batch_size": 1, "precision": "bfloat16"}
    cases = [
        {
            "model": ODD,
            "parallel": parallel,
            "train": {**train, **own},
            "rank": rank * _ranks_per_stage(parallel),
            "steps": 1,
        }
        for parallel, own in LAYOUTS
        for rank in sorted({0, parallel.get("pipeline", 1) - 1})
    ]
    assert len(cases) > 12
    for case, found in zip(cases, run_worker("simulated_step", cases), strict=True):
        workload, layout = planned(case)
        mine = rank_parameters(workload.model, layout, case["rank"] // _ranks_per_stage(case["parallel"]))
        assert [found[key] for key in ("parameters", "gradients", "optimizer")] == [4 * mine, 4 * mine, 8 * mine], case


def _ranks_per_stage(parallel: dict[str, Any]) -> int:
    return int(parallel.get("data", 1) * parallel.get("tensor", 1))


@pytest.mark.parametrize("tensor", [1, 2, 3, 6])
@pytest.mark.parametrize("shares", [1, 2, 4, 5, 64])
def test_the_closed_form_is_the_sum_over_all_tensors(tensor: int, shares: int) -> None:
    model = ModelSettings(**ODD)

    def rows(shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(-(-shape[0] // shares) * math.prod(shape[1:]) for shape in shapes.values())

    for pipeline in (1, 2, 3):
        layout = Layout(tensor=tensor, pipeline=pipeline)
        for rank in range(pipeline):
            found = held(model, layout, rank, shares)
            assert found.layer == rows(layer_shapes(model, tensor))
            assert found.root == rows(root_shapes(model, tensor, rank == 0, rank == pipeline - 1))


def test_every_layer_is_on_one_pipeline_rank() -> None:
    model = ModelSettings(**{**ODD, "n_layer": 23})
    for pipeline, stages in ((1, 1), (2, 1), (4, 1), (4, 3), (5, 4)):
        layout = Layout(pipeline=pipeline, virtual_stages=stages)
        assert sum(held(model, layout, rank).layers for rank in range(pipeline)) == 23
