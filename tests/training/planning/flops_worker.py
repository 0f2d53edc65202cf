"""One process of a job: counts the operations of the trainer's step, in several layouts and precisions."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from common.settings import ParallelSettings
from tests.training.helpers import open_session, settings_of, step_batches
from tests.training.memory_worker import RECOMPUTE, in_precision
from training.parallel.launch import read_launch
from training.parallel.process_group import World, started
from training.run_plan import Plan, make_plan
from training.step import train_step

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": 2},
        {"data": 2, "zero_stage": 3},
    ],
}  # by the number of processes


def _forward(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _backward(gradient: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(gradient, q, k, v))  # type: ignore[no-untyped-call]


_CPU_ATTENTION = {  # the counter knows only the kernels of GPUs
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def in_layout(plan: Plan, parallel: dict[str, Any]) -> Plan:
    """The plan with another parallel layout."""
    return replace(plan, experiment=plan.experiment.model_copy(update={"parallel": ParallelSettings(**parallel)}))


def counted(plan: Plan, world: World) -> list[int]:
    """Operations of a step on this rank: for each layout, precision and kind of recompute."""
    found = []
    for parallel, precision, recompute in cases(world.size):
        layout = in_layout(plan, parallel)
        session = open_session(in_precision(layout, precision, recompute, parallel.get("zero_stage", 0)), world)
        batches = step_batches(session, 0)
        with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
            train_step(session, 1, next(batches), 0.01)
        batches.close()
        found.append(counter.get_total_flops())
    return found


def cases(processes: int) -> list[tuple[dict[str, Any], str, str]]:
    """(parallel, precision, recompute)."""
    return list(product(LAYOUTS[processes], ("bfloat16",), RECOMPUTE))


def main(argv: list[str]) -> int:
    config, launch = Path(argv[0]), read_launch()
    with started(launch, config.parent) as world:
        found = counted(make_plan(settings_of(config), "tiny"), world)
    config.with_name(f"flops.{launch.rank}.json").write_text(json.dumps(found))
    return 0
