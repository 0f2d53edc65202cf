"""What one process of a job does: it trains a configuration eagerly and compiled, and counts what was compiled.

The compiler's front end is the real one; its graphs then run as they are (`aot_eager`), which takes no C++ compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from tests.training.helpers import open_session, settings_of, step_batches
from training.checkpoint.replicas import compare_replicas
from training.launch.process_group import World
from training.planning.run import make_plan
from training.step import train_step, validate

STEPS = 2


@contextmanager
def counted_graphs() -> Iterator[list[int]]:
    """Inside, torch.compile counts how often each of its graphs runs forward."""
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled, index = aot_eager(graph, inputs), len(runs)
        runs.append(0)

        def run(*arguments: Any) -> Any:
            runs[index] += 1
            return compiled(*arguments)

        return run

    real = torch.compile
    torch.compile = lambda function: real(function, backend=backend)  # type: ignore[assignment]
    torch._dynamo.reset()
    counters.clear()
    try:
        yield runs
    finally:
        torch.compile = real


def course(config: Path, world: World, mode: str) -> dict[str, Any]:
    """Two steps and a validation in a mode of train.compile: what they find, graphs and breaks."""
    plan = make_plan(settings_of(config), "tiny")
    train = plan.experiment.train.model_copy(update={"compile": mode})
    plan = replace(plan, experiment=plan.experiment.model_copy(update={"train": train}))
    with counted_graphs() as runs:
        session = open_session(plan, world)
        batches = step_batches(session, 0)
        found = [train_step(session, iteration, next(batches), 0.01)[:2] for iteration in range(1, STEPS + 1)]
        batches.close()
        seen: dict[str, Any] = {"train": found, "train graphs": sorted(runs)}
        runs[:] = [0] * len(runs)
        seen["valid"] = validate(session, plan.data.valid, train.global_batch_size)
    frames = counters["frames"]
    return seen | {
        "valid graphs": sorted(filter(None, runs)),
        "breaks": [*counters["graph_break"], *counters["unimplemented"]],
        "skipped frames": frames["total"] - frames["ok"],
        "drifted": [*compare_replicas(session.parameters).drifted],
    }


def courses(world: World, config: Path) -> dict[str, dict[str, Any]]:
    """The course of a configuration without and with its compiler."""
    mode = settings_of(config).models["tiny"].train.compile
    return {"eager": course(config, world, "none"), "compiled": course(config, world, mode)}
