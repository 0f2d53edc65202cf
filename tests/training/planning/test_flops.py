"""Predicted operations equal those that PyTorch counts in the trainer's own step."""

import json
from pathlib import Path

import pytest

from tests.training.helpers import launch_ok, make_run, settings_of
from tests.training.planning.flops_worker import cases
from training.planning.flops import executed_flops, flops_per_token
from training.planning.layout import Layout
from training.planning.machines import cpu_machine
from training.planning.workload import Workload


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_executed_operations_equal_the_counters(tmp_path: Path, processes: int) -> None:
    config = make_run(tmp_path, model={"dropout": 0.0}, train={"global_batch_size": 4})
    launch_ok(processes, "tests.training.planning.flops_worker", config)
    ranks = [json.loads((tmp_path / f"flops.{rank}.json").read_text()) for rank in range(processes)]
    experiment = settings_of(config).models["tiny"]
    workload = Workload.of(experiment, cpu_machine(processes, 2**32, 1e11))
    expected = cases(processes)
    for (parallel, precision, recompute), *counted in zip(expected, *ranks, strict=True):
        accumulation = 2 // parallel.get("data", 1)
        layout = Layout(**parallel, micro_batch_size=2, accumulation=accumulation, recompute=recompute)
        assert executed_flops(workload, layout) == sum(counted), (parallel, precision, recompute)


def test_only_recompute_padding_and_fused_attention_exceed_the_models_work(tmp_path: Path) -> None:
    experiment = settings_of(make_run(tmp_path)).models["tiny"]
    model = experiment.model.model_copy(update={"vocab_size": 256})
    workload = Workload(model, "bfloat16", compiled=True)
    tokens = model.seq_len * (layout := Layout(micro_batch_size=4)).global_batch_size
    small = 6 * (13 * model.n_layer + 2) * model.n_embd  # biases and LayerNorm, which the convention counts as products
    fused = 2 * model.n_layer * model.n_embd * model.seq_len  # scores are computed again in the backward pass
    assert executed_flops(workload, layout) == tokens * (flops_per_token(model) - small + fused)
    assert executed_flops(workload, layout._replace(recompute="selective")) == executed_flops(workload, layout)
    full = executed_flops(workload, layout._replace(recompute="full")) / executed_flops(workload, layout)
    assert 1.1 < full < 1.3
