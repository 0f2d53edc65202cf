"""A compiled step has no graph break in any layout, and no part of it silently runs eagerly."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from tests.training.helpers import make_run, on_ranks, open_session, plan_of, settings_of, train_steps
from training.checkpoint.replicas import compare_replicas
from training.launch.process_group import World
from training.step import validate

STEPS = 2


@contextmanager
def counted_graphs() -> Iterator[list[int]]:
    """Inside, torch.compile counts how often each of its graphs runs forward.

    The compiler's front end is the real one; its graphs run as they are (`aot_eager`), which takes
    no C++ compiler.
    """
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
    plan = plan_of(config, f"train.compile={mode}")
    with counted_graphs() as runs:
        session = open_session(plan, world)
        found = [step[:2] for step in train_steps(session, STEPS)]
        seen: dict[str, Any] = {"train": found, "train graphs": sorted(runs)}
        runs[:] = [0] * len(runs)
        seen["valid"] = validate(session, plan.data.valid, plan.experiment.train.global_batch_size)
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


LAYERS, MICRO_BATCHES = 3, 8  # of a global batch of 16 samples, before they are shared by data-parallel ranks
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
ZERO_3 = {"data": 2, "zero_stage": 3}


def graph_runs(parallel: dict[str, Any], compiled: str, rank: int, size: int, steps: int) -> list[int]:
    """How often each graph of a rank must run in some steps: one graph for all layers."""
    passes, pipeline = steps * MICRO_BATCHES // parallel.get("data", 1), parallel.get("pipeline", 1)
    if compiled == "model":
        return [passes]
    stage = rank * pipeline // size
    first, end = (-(-LAYERS * edge // pipeline) for edge in (stage, stage + 1))
    edges = (stage == 0) + (stage == pipeline - 1)  # embedding, loss
    return sorted([passes] * edges + [passes * (end - first)])


def check(folder: Path, parallel: dict[str, Any], dropout: float = 0.0, **train: Any) -> None:
    """Compare what a layout computes compiled and eagerly."""
    train = {"recompute": "selective", "compile": "blocks", **train}
    size = math.prod(parallel.get(axis, 1) for axis in ("tensor", "data", "pipeline"))
    sections = {"model": {"n_layer": LAYERS, "dropout": dropout}, "parallel": parallel}
    config = make_run(folder, **sections, train={"global_batch_size": 2 * MICRO_BATCHES, **train})
    for rank, seen in enumerate(on_ranks(size, courses, config, timeout=550)):
        compiled = seen["compiled"]
        assert (compiled["breaks"], compiled["skipped frames"]) == ([], 0)
        assert compiled["drifted"] == [], "ranks drew other masks"
        for part, steps in (("train", STEPS), ("valid", 1)):
            assert compiled[f"{part} graphs"] == graph_runs(parallel, train["compile"], rank, size, steps), part
        found, eager = (
            [course["valid"], *course["train"][0], *course["train"][1]] for course in (compiled, seen["eager"])
        )
        assert all(map(math.isfinite, found))
        if dropout == 0:
            assert found == pytest.approx(eager, rel=1e-2 if "precision" in train else 1e-5)


def test_the_hardest_layout_compiles_whole(tmp_path: Path) -> None:
    check(tmp_path, SEQUENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "dropout", "train"),
    [
        *(({}, 0.1, {"recompute": kind, "compile": "model"}) for kind in ("none", "full")),
        *((SEQUENCE, 0.1, {"recompute": "full", "compile": mode}) for mode in ("blocks", "model")),
        *(({"data": 2, "zero_stage": stage}, 0.0, {"recompute": "full"}) for stage in range(4)),
        ({"tensor": 2}, 0.1, {"recompute": "full"}),
        ({"pipeline": 2}, 0.1, {"compile": "model"}),
        (SEQUENCE, 0.0, {"precision": "bfloat16", "loss": "chunked"}),
        ({**SEQUENCE, **ZERO_3}, 0.0, {}),
        ({**SEQUENCE, "pipeline": 2}, 0.1, {"recompute": "full"}),
    ],
)
def test_every_layout_compiles_whole(
    tmp_path: Path, parallel: dict[str, Any], dropout: float, train: dict[str, Any]
) -> None:
    check(tmp_path, parallel, dropout, **train)
