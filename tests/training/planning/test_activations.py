"""The planner's activations are what autograd keeps."""

from itertools import product
from typing import Any

import pytest

from tests.training.planning.cases import CPU, GPU, planned
from tests.training.planning.simulated_step import run_worker
from training.planning.activations import layer_bytes, loss_bytes
from training.planning.layout import Layout
from training.planning.workload import Workload

MODEL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "seq_len": 128, "vocab_size": 256}
SPLITS: list[dict[str, Any]] = [{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}]
COMPILED = [
    *product(SPLITS, ["bfloat16"], ["none", "selective", "full"], [0.0]),
    *product([{}, SPLITS[2]], ["bfloat16"], ["none", "selective", "full"], [0.1]),
    *product([{}], ["float32"], ["none", "selective"], [0.1]),
]


def case(parallel: dict[str, Any], precision: str, recompute: str, dropout: float, compiled: bool) -> dict[str, Any]:
    train = {"precision": precision, "recompute": recompute, "compile": "blocks" if compiled else "none"}
    return {
        "model": {**MODEL, "dropout": dropout},
        "parallel": parallel,
        "train": {"micro_batch_size": 4, **train},
        "attention_dropout": not compiled,  # without it a CPU takes the fused kernel that GPUs have in any case
    }


def predicted(case: dict[str, Any]) -> float:
    """Bytes that the whole model keeps from the forward to the backward pass."""
    machine = CPU if case["attention_dropout"] else GPU
    workload, layout = planned(case, machine)
    layer = layer_bytes(workload, layout, machine)
    loss = loss_bytes(workload, layout, machine, layer)
    return workload.model.n_layer * (layer.saved + layer.casts) + layer.mask + loss.saved + loss.logits


def errors(cases: list[dict[str, Any]], key: str) -> dict[str, float]:
    """The relative error of each case's prediction."""
    measured = run_worker("saved_activations", cases)
    return {str(case): predicted(case) / found[key] - 1 for case, found in zip(cases, measured, strict=True)}


EAGER = [
    *product([{}, SPLITS[2]], ["bfloat16"], ["none", "selective", "full"], [0.0]),
    *product([{}, SPLITS[2]], ["float32"], ["none", "selective"], [0.0]),
    ({}, "bfloat16", "none", 0.1),
]
MORE = [
    *product([SPLITS[1]], ["float32", "bfloat16"], ["none", "selective", "full"], [0.0]),
    *product([{}, SPLITS[2]], ["float32"], ["full"], [0.0]),
    *product(SPLITS[1:], ["bfloat16"], ["none"], [0.1]),
]


@pytest.mark.parametrize("keys", [EAGER, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "others"])
def test_eager_activations_are_within_five_per_cent_of_what_is_kept(keys: list[Any]) -> None:
    found = errors([case(*each, compiled=False) for each in keys], "storages")  # hooks do not see what selective keeps
    assert max(map(abs, found.values())) < 0.05, found


def test_hooks_see_what_is_kept_without_recompute_and_with_full_recompute() -> None:
    cases = [case({}, "bfloat16", kind, 0.0, compiled=False) for kind in ("none", "full")]
    found = errors(cases, "hooks")
    assert max(map(abs, found.values())) < 0.05, found


@pytest.mark.slow
def test_compiled_activations_are_within_five_per_cent_of_what_autograd_saves() -> None:
    found = errors([case({}, "bfloat16", "none", 0.1, compiled=True)], "hooks")
    assert max(map(abs, found.values())) < 0.05, found


@pytest.mark.slow
def test_compiled_activations_are_right_in_every_layout() -> None:
    found = errors([case(*keys, compiled=True) for keys in COMPILED], "hooks")
    assert max(map(abs, found.values())) < 0.05, found


def test_dropout_costs_two_masks_of_a_byte_per_layer_on_gpus() -> None:
    layout = Layout(micro_batch_size=4)
    with_masks, without = (
        layer_bytes(Workload(planned(each)[0].model, "bfloat16", True), layout, GPU).saved
        for each in (case({}, "bfloat16", "none", dropout, True) for dropout in (0.1, 0.0))
    )
    assert with_masks - without == 2 * 4 * 128 * 128
