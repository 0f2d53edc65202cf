"""The search finds what trying every layout finds, with far fewer predictions."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.settings import GpuSettings, ModelSettings
from training.planning import search as module
from training.planning.layout import Layout, PlanRequest, Term, Workload
from training.planning.machines import GIB, Machine, cpu_machine, machine
from training.planning.search import Prediction, fewest_gpus, search

MODEL = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=1024)
WORKLOAD = Workload(MODEL, "bfloat16", compiled=True)


def gpus(memory_gib: float, per_node: int = 8) -> Machine:
    kind = GpuSettings(
        memory_gib=memory_gib,
        bfloat16_tflops=100,
        float32_tflops=10,
        memory_gb_per_s=1000,
        node_gb_per_s=100,
        network_gb_per_s=10,
    )
    return Machine("ours", int(memory_gib * GIB), kind, per_node)


@pytest.fixture
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world in which every measure costs speed and saves memory: 1 GiB of states, 1 GiB of
    activations per sample.
    """

    def memory(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
        split = layout.tensor * layout.pipeline
        shards = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0 + layout.data}[layout.zero_stage] * (1 + 9 * layout.offload)
        kept = {"none": 1.0, "selective": 0.5, "full": 0.1}[layout.recompute]
        return [
            Term("parameters", GIB / split / shards, "states"),
            Term("activations", kept * layout.micro_batch_size * GIB / layout.tensor, "activations"),
        ]

    def speed(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
        slower = {"none": 1.0, "selective": 1.1, "full": 1.3}[layout.recompute] * (1 + 0.01 * layout.zero_stage)
        slower *= (1 + 0.1 * (layout.tensor - 1)) * (1 + 0.2 * (layout.pipeline - 1)) * (1 + layout.offload)
        work = layout.global_batch_size / layout.world_size
        return [Term("matrix products", work * slower * (1 + 1 / layout.micro_batch_size), "work")]

    monkeypatch.setattr(module, "memory_terms", memory)
    monkeypatch.setattr(module, "speed_terms", speed)


def layouts(workload: Workload, machine: Machine, request: PlanRequest) -> Iterator[Layout]:
    """Every layout that the trainer accepts for a request, whether it fits or not."""
    for mesh in module._meshes(machine, workload, request):
        for layout in module._batches(request, mesh):
            for offload in module._offload_choices(machine):
                yield from module._savings(layout, offload)


def best_of_all(workload: Workload, machine: Machine, request: PlanRequest) -> Prediction | None:
    every = (Prediction(workload, layout, machine) for layout in layouts(workload, machine, request))
    fitting = [prediction for prediction in every if prediction.fits and not prediction.layout.offload]
    return min(fitting, key=lambda prediction: prediction.rank, default=None)


@pytest.mark.parametrize("memory", [0.2, 0.5, 1.2, 3.0, 40.0])
def test_the_search_finds_the_best_of_all_layouts(simple: None, memory: float) -> None:
    request = PlanRequest(16, 96)
    best = best_of_all(WORKLOAD, gpus(memory), request)
    found = search(WORKLOAD, gpus(memory), request)
    assert found[0] == best
    order = [(prediction.verdict == "tight", -float(f"{prediction.tokens_per_second:.4g}")) for prediction in found]
    assert order == sorted(order)


def test_the_predictions_prune_without_losing_the_best() -> None:
    where, request = machine("a100-40g", {}), PlanRequest(8, 512)
    best = best_of_all(WORKLOAD, where, request)
    assert best is not None and search(WORKLOAD, where, request)[0].layout == best.layout


def test_a_layout_is_tight_from_80_and_too_large_from_92_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    where = gpus(1)
    for share, verdict in ((0.7999, "feasible"), (0.8, "tight"), (0.9199, "tight"), (0.92, "too large")):
        monkeypatch.setattr(module, "memory_terms", lambda *_, held=share * where.memory: [Term("", held, "")])
        found = Prediction(WORKLOAD, Layout(), where)
        assert (found.verdict, found.fits) == (verdict, share < 0.92)


def test_offload_is_the_last_resort_and_needs_a_gpu(simple: None) -> None:
    assert not any(prediction.layout.offload for prediction in search(WORKLOAD, gpus(1.2), PlanRequest(2, 2)))
    found = search(WORKLOAD, gpus(0.16), PlanRequest(2, 2))
    assert found and all(prediction.layout.offload for prediction in found)
    laptop = replace(cpu_machine(2, 2 * int(0.16 * GIB), 1e11), per_node=8)
    assert search(WORKLOAD, laptop, PlanRequest(2, 2)) == []


def test_layouts_are_all_that_may_differ_and_tensor_ranks_never_leave_their_node() -> None:
    stages = {(layout.pipeline > 1, layout.zero_stage) for layout in layouts(WORKLOAD, gpus(80), PlanRequest(8, 64))}
    assert stages == {(piped, stage) for piped in (False, True) for stage in (0, 1, 2, 3)} - {(True, 2)}
    found = list(layouts(WORKLOAD, gpus(80, per_node=4), PlanRequest(24, 48)))
    assert {layout.tensor for layout in found} == {1, 2, 4}
    found = [layout for layout in layouts(WORKLOAD, gpus(80), PlanRequest(1, 90)) if layout.recompute == "none"]
    assert [layout.micro_batch_size for layout in found] == [1, 2, 3, 5, 6, 9, 10, 15, 18, 30, 45, 90]
    only = list(layouts(WORKLOAD, gpus(80), PlanRequest(2, 90, micro_batch_size=5)))
    assert only and all(layout.micro_batch_size == 5 for layout in only)


def test_the_fewest_gpus_are_the_first_doubling_on_which_something_fits(simple: None) -> None:
    where, request = gpus(0.1), PlanRequest(2, 64)
    enough = fewest_gpus(WORKLOAD, where, request)
    assert enough is not None and search(WORKLOAD, where, replace(request, gpus=enough))
    assert not search(WORKLOAD, where, replace(request, gpus=enough // 2))
