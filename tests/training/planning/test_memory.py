"""The planner's peak is that of the trainer's step, and it knows which parameters a rank holds."""

import math
from itertools import product
from typing import Any

import pytest

from common.settings import ModelSettings
from tests.training.planning.cases import (
    CASES,
    CPU,
    GPU,
    MODELS,
    QUICK,
    UNEVEN,
    pipeline_rank,
    planned,
    predicted,
)
from tests.training.planning.simulated_step import simulated
from training.planning.flops import executed_flops, flops_per_token
from training.planning.layout import Layout
from training.planning.memory import PARTS, memory_terms, rank_terms, total
from training.planning.shards import held, layer_shapes, rank_parameters, root_shapes
from training.planning.terms import by_part
from training.planning.workload import Workload

GPT2_345M = Workload(ModelSettings(n_layer=24, n_head=16, n_embd=1024), "bfloat16", compiled=True)


def check(cases: list[dict[str, Any]], tolerance: float) -> None:
    """Parameters, gradients and moments are exact; the peak is near where tensors are large enough to count."""
    for case, found in zip(cases, simulated(cases), strict=True):
        workload, layout = planned(case)
        mine = rank_parameters(workload.model, layout, pipeline_rank(case))
        assert [found[key] for key in ("parameters", "gradients", "optimizer")] == [4 * mine, 4 * mine, 8 * mine], case
        if case not in UNEVEN:
            assert predicted(case) == pytest.approx(found["peak"], rel=tolerance), case["title"]
        if layout.pipeline == 1:
            assert executed_flops(workload, layout) == found["flops"] * layout.tensor * layout.data, case["title"]


def test_parameters_peak_and_operations_are_those_of_a_simulated_step() -> None:
    check([*QUICK, *UNEVEN], 0.02)


@pytest.mark.slow
def test_parameters_peak_and_operations_are_those_of_a_simulated_step_in_every_kind_of_layout() -> None:
    check(CASES, 0.03)


def test_only_recompute_padding_and_fused_attention_exceed_the_models_work() -> None:
    model = ModelSettings(n_layer=2, n_head=4, n_embd=32, seq_len=16, vocab_size=256)
    workload = Workload(model, "bfloat16", compiled=True)
    tokens = model.seq_len * (layout := Layout(micro_batch_size=4)).global_batch_size
    small = 6 * (13 * model.n_layer + 2) * model.n_embd  # biases and LayerNorm, which the convention counts as products
    fused = 2 * model.n_layer * model.n_embd * model.seq_len  # scores are computed again in the backward pass
    assert executed_flops(workload, layout) == tokens * (flops_per_token(model) - small + fused)
    assert executed_flops(workload, layout._replace(recompute="selective")) == executed_flops(workload, layout)


def test_a_rank_holds_the_known_numbers_of_parameters() -> None:
    model = GPT2_345M.model
    assert rank_parameters(model, Layout()) == 354_871_296  # 50,304 rows
    assert rank_parameters(model, Layout(tensor=2)) == 178_100_224  # 50,432 rows
    assert model.parameters == 354_823_168  # 50,257 rows
    large = ModelSettings(n_layer=32, n_head=32, n_embd=4096, seq_len=2048)
    assert round(large.parameters / 1e9, 3) == 6.658
    assert round(ModelSettings(n_layer=48, n_head=64, n_embd=6144, seq_len=2048).parameters / 1e9, 1) == 22.1


def test_the_closed_form_is_the_sum_over_all_tensors() -> None:
    model = ModelSettings(**MODELS["uneven"])
    for tensor, shares, pipeline in product((1, 2, 3, 6), (1, 2, 4, 5, 64), (1, 2, 3)):

        def rows(shapes: dict[str, tuple[int, ...]], shares: int = shares) -> int:
            return sum(-(-shape[0] // shares) * math.prod(shape[1:]) for shape in shapes.values())

        layout = Layout(tensor=tensor, pipeline=pipeline)
        for rank in range(pipeline):
            found = held(model, layout, rank, shares)
            assert found.layer == rows(layer_shapes(model, tensor))
            assert found.root == rows(root_shapes(model, tensor, rank == 0, rank == pipeline - 1))
    deep = model.model_copy(update={"n_layer": 23})
    for pipeline, stages in ((1, 1), (2, 1), (4, 1), (4, 3), (5, 4)):
        layout = Layout(pipeline=pipeline, virtual_stages=stages)
        assert sum(held(deep, layout, rank).layers for rank in range(pipeline)) == 23


def test_the_terms_cover_every_part_and_the_total_is_that_of_the_fullest_rank() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, zero_stage=1, micro_batch_size=4, accumulation=4)
    last = rank_terms(GPT2_345M, layout, GPU, 1)
    assert set(by_part(last)) == set(PARTS)
    assert all(term.value > 0 and term.formula for term in last)
    for recompute, pipeline, schedule, count in product(("none", "full"), (3, 7), ("gpipe", "1f1b"), (8, 64)):
        sizes: dict[str, Any] = {"pipeline": pipeline, "accumulation": count, "micro_batch_size": 2}
        layout = Layout(**sizes, schedule=schedule, recompute=recompute)
        ranks = [total(rank_terms(GPT2_345M, layout, GPU, rank)) for rank in range(pipeline)]
        assert total(memory_terms(GPT2_345M, layout, GPU)) == max(ranks)


def test_more_sharing_never_takes_more_memory() -> None:
    def peak(**keys: Any) -> float:
        return total(memory_terms(GPT2_345M, Layout(micro_batch_size=8, **keys), GPU))

    assert peak(recompute="full") < peak(recompute="selective") < peak()
    sharded = [peak(data=4, zero_stage=stage, accumulation=2) for stage in (0, 1, 2, 3)]
    assert sharded == sorted(sharded, reverse=True)
    assert peak(tensor=4, sequence_parallel=True) < peak(tensor=4) < peak(tensor=2) < peak()
    offloaded = memory_terms(GPT2_345M, Layout(data=4, zero_stage=3, offload=True), GPU)
    assert not {"parameters", "optimizer"} & set(by_part(offloaded))


def test_a_cpu_process_has_python_and_glibc_instead_of_cuda() -> None:
    model = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=256)
    terms = memory_terms(Workload(model, "float32", compiled=False), Layout(micro_batch_size=2), CPU)
    assert not any("CUDA" in term.name or "NCCL" in term.name for term in terms)
    assert total(terms) == pytest.approx(3.06 * 2**30, rel=0.1)  # peak RSS of three steps: docs/planning.md
