"""The planner's peak is that of the trainer's step."""

from itertools import product
from typing import Any

import pytest

from common.settings import ModelSettings
from tests.training.planning.cases import CPU, FAST, GPU, SLOW, predicted
from tests.training.planning.simulated_step import run_worker
from training.planning.layout import Layout
from training.planning.memory import PARTS, memory_terms, rank_terms, total
from training.planning.moments import in_flight
from training.planning.terms import by_part
from training.planning.workload import Workload

GPT2_345M = Workload(ModelSettings(n_layer=24, n_head=16, n_embd=1024), "bfloat16", compiled=True)


def check_peaks(cases: list[dict[str, Any]]) -> None:
    found = run_worker("simulated_step", cases)
    errors = {
        case["title"]: predicted(case) / measured["peak"] - 1 for case, measured in zip(cases, found, strict=True)
    }
    assert max(map(abs, errors.values())) < 0.1, errors


def test_the_predicted_peak_is_within_ten_per_cent_of_a_simulated_step() -> None:
    check_peaks(FAST)


@pytest.mark.slow
def test_the_predicted_peak_is_right_in_every_kind_of_layout() -> None:
    check_peaks(SLOW)


def test_the_terms_cover_every_part_in_positive_bytes() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, zero_stage=1, micro_batch_size=4, accumulation=4)
    last = rank_terms(GPT2_345M, layout, GPU, 1)
    assert set(by_part(last)) == set(PARTS)
    assert all(term.value > 0 and term.formula for term in last)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_fullest_rank_is_the_first_the_second_or_the_last(recompute: str) -> None:
    for pipeline, schedule, count in product((3, 4, 7), ("gpipe", "1f1b"), (8, 64)):
        layout = Layout(
            pipeline=pipeline, schedule=schedule, accumulation=count, micro_batch_size=2, recompute=recompute
        )
        ranks = [total(rank_terms(GPT2_345M, layout, GPU, rank)) for rank in range(pipeline)]
        assert total(memory_terms(GPT2_345M, layout, GPU)) == max(ranks)


def test_more_sharing_never_takes_more_memory() -> None:
    def peak(**keys: Any) -> float:
        return total(memory_terms(GPT2_345M, Layout(micro_batch_size=8, **keys), GPU))

    assert peak(recompute="full") < peak(recompute="selective") < peak()
    sharded = [peak(data=4, zero_stage=stage, accumulation=2) for stage in (0, 1, 2, 3)]
    assert sharded == sorted(sharded, reverse=True)
    assert peak(tensor=4, sequence_parallel=True) < peak(tensor=4) < peak(tensor=2) < peak()


def test_offload_leaves_no_parameters_or_moments_on_the_gpu() -> None:
    layout = Layout(data=4, zero_stage=3, micro_batch_size=1, recompute="full")
    terms = memory_terms(GPT2_345M, layout._replace(offload=True), GPU)
    assert not {"parameters", "optimizer"} & set(by_part(terms))
    assert total(terms) < total(memory_terms(GPT2_345M, layout, GPU))


def test_a_first_rank_keeps_as_many_micro_batches_as_there_are_stages_after_it() -> None:
    pipeline = Layout(pipeline=4, accumulation=16)
    assert [in_flight(pipeline, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(pipeline._replace(accumulation=2), 0) == 2
    assert in_flight(pipeline._replace(schedule="gpipe"), 3) == 16
    assert in_flight(Layout(accumulation=16), 0) == 1


def test_a_cpu_process_has_python_and_glibc_instead_of_cuda() -> None:
    model = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=256)
    terms = memory_terms(Workload(model, "float32", compiled=False), Layout(micro_batch_size=2), CPU)
    assert not any("CUDA" in term.name or "NCCL" in term.name for term in terms)
    assert total(terms) == pytest.approx(3.06 * 2**30, rel=0.1)  # peak RSS of three steps: docs/planning.md
