"""The sentence on the best layout says what it does without, and what each of its measures gains."""

import pytest

from common.settings import ModelSettings
from training.planning.layout import Layout
from training.planning.machines import Machine, machine
from training.planning.search import Prediction
from training.planning.table import short, size, why
from training.planning.terms import Term
from training.planning.workload import Workload

WORKLOAD = Workload(ModelSettings(n_layer=12, n_head=12, n_embd=768), "bfloat16", compiled=True)


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split by tensor or pipeline costs a tenth; ZeRO 1 gains 4 %; without a split, memory is tight at batch 8."""

    def speed(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
        seconds = (1.1 if layout.tensor * layout.pipeline > 1 else 1.0) * (0.96 if layout.zero_stage == 1 else 1.0)
        return [Term("matrix products", seconds * layout.global_batch_size / layout.world_size, "", "")]

    def memory(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
        share = 0.85 if layout.micro_batch_size == 8 and layout.tensor == 1 else 0.5
        return [Term("parameters", share * machine.memory, "", "")]

    monkeypatch.setattr("training.planning.search.speed_terms", speed)
    monkeypatch.setattr("training.planning.search.memory_terms", memory)


def reason(*layouts: Layout) -> str:
    found = [Prediction(WORKLOAD, layout, machine("h100", {})) for layout in layouts]
    return why(sorted(found, key=lambda one: one.rank))


def test_the_sentence_names_what_is_not_needed_and_compares_what_is_with_the_best_without_it() -> None:
    assert reason(Layout(data=8), Layout(tensor=2, data=4)) == (
        "Fits without recompute, tensor parallelism or a pipeline."
    )
    assert "; 4.2% faster than the best without ZeRO 1: " in reason(Layout(data=8), Layout(data=8, zero_stage=1))
    assert "; 4.2 times as fast as " in reason(Layout(data=8, zero_stage=1), Layout(data=2))
    tight = reason(Layout(tensor=2, data=4), Layout(data=8, micro_batch_size=8))
    assert tight == "Fits without recompute or a pipeline; without tensor parallelism the fit is tight."
    assert reason(Layout(pipeline=2, recompute="full", accumulation=2)) == (
        "Fits without tensor parallelism; nothing fits without recompute; nothing fits without a pipeline."
    )
    offload = reason(Layout(data=2, zero_stage=2, offload=True), Layout(data=2, micro_batch_size=8))
    assert offload.endswith(f" {16 * WORKLOAD.model.parameters / 2 / 2**30:.1f} GiB of CPU memory.")


def test_layouts_and_sizes_are_short() -> None:
    assert short(Layout()) == "batch 1 x 1"
    everything = Layout(8, True, 4, "interleaved_1f1b", 2, 16, 3, True, 2, 8, "full")
    assert short(everything) == "tp 8, pp 4 x 2, dp 16, ZeRO 3, offload, batch 2 x 8, full recompute"
    counts = [0, 999, 1000, 1.5e6, 12.34e9, 5e15]
    assert [size(count) for count in counts] == ["0 B", "999 B", "1 kB", "1.5 MB", "12.3 GB", "5,000 TB"]
