"""The planner's peak is that of the trainer's step, and it knows which parameters a rank holds."""

from itertools import product
from typing import Any

import pytest

from common.settings import Experiment, ModelSettings
from tests.training.planning.simulated_step import simulate
from training.planning.layout import Layout, Workload, by_part, total
from training.planning.machines import Machine, known_gpus
from training.planning.memory import PARTS, held, in_flight, memory_terms, peak

GPU = Machine("h100", 2**60, known_gpus()["h100"], 8)  # memory without end: the loss is whole
UNEVEN = {"n_layer": 5, "n_head": 6, "n_embd": 42, "seq_len": 18, "vocab_size": 257}  # as FSDP's shards are
MODELS: dict[str, dict[str, Any]] = {
    "345M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "345M/2": {"n_layer": 12, "n_head": 16, "n_embd": 1024},
    "345M/6": {"n_layer": 4, "n_head": 16, "n_embd": 1024},
    "uneven": UNEVEN,
    "7B": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "seq_len": 2048},
}
GPT2_345M = Workload(ModelSettings(**MODELS["345M"]), "bfloat16", compiled=True)

SEQUENCE: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
INTERLEAVED: dict[str, Any] = {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}

# model, rank, `parallel`, `train`
QUICK = ("345M/6", 0, SEQUENCE, {"micro_batch_size": 8, "recompute": "selective"})
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("345M/6", 0, {"data": 4, "zero_stage": 3}, {"accumulation": 2, "recompute": "full", "precision": "float32"}),
    ("345M/6", 1, {"pipeline": 2}, {"micro_batch_size": 4, "accumulation": 6}),
    ("uneven", 1, INTERLEAVED, {"accumulation": 2}),
    ("uneven", 4, {**SEQUENCE, "pipeline": 2, "data": 2, "zero_stage": 2}, {"accumulation": 4}),
    ("345M/6", 0, {}, {"micro_batch_size": 8}),
    ("345M/6", 0, {"data": 2, "zero_stage": 1}, {"micro_batch_size": 2, "accumulation": 2}),
    ("uneven", 0, {"tensor": 3, "sequence_parallel": True}, {}),
    ("uneven", 0, {"data": 5, "zero_stage": 3}, {}),
    *(("345M", 0, {}, {"micro_batch_size": 8, "recompute": kind}) for kind in ("none", "full", "selective")),
    ("345M", 0, {}, {"micro_batch_size": 8, "loss": "chunked"}),
    *(("345M", 0, {"tensor": 2, "sequence_parallel": sliced}, {"micro_batch_size": 8}) for sliced in (True, False)),
    *(("345M/2", 0, {"data": 2, "zero_stage": zero}, {"micro_batch_size": 8, "accumulation": 2}) for zero in range(4)),
    ("345M/2", 1, {"pipeline": 4}, {"micro_batch_size": 4, "accumulation": 16, "recompute": "full"}),
    ("345M/2", 0, {"pipeline": 2, "schedule": "gpipe"}, {"micro_batch_size": 2, "accumulation": 4}),
    ("345M/2", 0, INTERLEAVED, {"micro_batch_size": 4, "accumulation": 4}),
    ("7B", 0, {**SEQUENCE, "tensor": 4, "data": 2, "zero_stage": 1}, {"micro_batch_size": 2, "recompute": "full"}),
    ("7B", 0, {"data": 4, "zero_stage": 1}, {"micro_batch_size": 4, "recompute": "full"}),
    ("7B", 0, {"data": 4, "zero_stage": 3}, {"micro_batch_size": 2, "recompute": "full", "accumulation": 2}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "rank", "parallel", "train"), [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_parameters_and_peak_are_those_of_a_simulated_step(
    model: str, rank: int, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    """Parameters, gradients and moments are exact; the peak is near where tensors are large enough
    to count.
    """
    train = {"iterations": 10, "compile": "none", "precision": "bfloat16", "micro_batch_size": 1, **train}
    sections = {"model": {**MODELS[model], "dropout": 0.0}, "parallel": parallel, "train": train}
    experiment = Experiment.model_validate(sections)
    workload, layout = Workload.of(experiment, GPU), Layout.of(experiment)
    pipeline_rank = rank // (layout.data * layout.tensor)  # ranks are (pp, dp, tp) with tp fastest
    found = simulate(experiment, rank)
    mine = held(workload.model, layout, pipeline_rank, layout.data if layout.zero_stage else 1).total
    assert [found[key] for key in ("parameters", "gradients", "optimizer")] == [4 * mine, 4 * mine, 8 * mine]
    if model != "uneven":
        assert sum(peak(workload, layout, GPU, pipeline_rank)) == pytest.approx(found["peak"], rel=0.04)


def test_a_rank_holds_the_known_numbers_of_parameters() -> None:
    model = GPT2_345M.model
    assert held(model, Layout(), 0).total == 354_871_296  # 50,304 rows
    assert held(model, Layout(tensor=2), 0).total == 178_100_224  # 50,432 rows
    assert model.parameters == 354_823_168  # 50,257 rows


def test_the_terms_cover_every_part_and_the_total_is_that_of_the_fullest_rank() -> None:
    layout = Layout(tensor=2, data=2, zero_stage=1, micro_batch_size=4, accumulation=4)
    assert set(by_part(memory_terms(GPT2_345M, layout, GPU))) == set(PARTS)
    for recompute, pipeline, schedule in product(("none", "full"), (3, 7), ("gpipe", "1f1b")):
        sizes: dict[str, Any] = {"pipeline": pipeline, "accumulation": 8, "micro_batch_size": 2}
        layout = Layout(**sizes, schedule=schedule, recompute=recompute)
        ranks = [sum(peak(GPT2_345M, layout, GPU, rank)) for rank in range(pipeline)]
        terms = memory_terms(GPT2_345M, layout, GPU)
        beside = [term for term in terms if term.part == "context" or term.name == "NCCL's buffers"]
        assert total(terms) - total(beside) == pytest.approx(max(ranks))


def test_offload_leaves_no_parameters_and_no_optimizer_on_the_gpu_and_a_cpu_process_has_python_instead_of_cuda() -> (
    None
):
    offloaded = memory_terms(GPT2_345M, Layout(data=4, zero_stage=3, offload=True), GPU)
    assert not {"parameters", "optimizer"} & set(by_part(offloaded))
    model = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=256)
    cpu = Machine("cpu", 2**40, known_gpus()["h100"], 1)
    terms = memory_terms(Workload(model, "float32", compiled=False), Layout(micro_batch_size=2), cpu)
    assert not any("CUDA" in term.name or "NCCL" in term.name for term in terms)
    assert total(terms) == pytest.approx(3.06 * 2**30, rel=0.1)  # peak RSS of three steps: docs/planning_model.md


def test_a_pipelines_rank_keeps_the_published_number_of_micro_batches() -> None:
    pipeline = Layout(pipeline=4, accumulation=16)
    assert [in_flight(pipeline, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(pipeline._replace(accumulation=2), rank) for rank in range(4)] == [2, 2, 2, 1]
    assert in_flight(pipeline._replace(schedule="gpipe"), 3) == 16
    assert in_flight(Layout(accumulation=16), 0) == 1
