"""The table of layouts: each trains, saves, resumes another's checkpoint and is converted."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from common.files import read_json
from convert import merge_mp, to_megatron, verify
from convert.sources.find import open_source
from tests.conftest import Once
from tests.convert.helpers import merged
from tests.helpers import run_main
from tests.training import parity
from tests.training.helpers import settings_of
from tests.training.parity import GRID, QUICK, TOLERANCE, Layout
from training import checkpoint, evaluate
from training.planning import layout as plan
from training.planning.memory import held

CELLS = pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, id=str(layout)) for layout in QUICK),
        *(pytest.param(layout, id=str(layout), marks=pytest.mark.slow) for layout in GRID if layout not in QUICK),
    ],
)


def runs_of(layout: Layout, once: Once) -> tuple[Path, Path]:
    """The folder of this layout's run, and the one that its single process started from."""

    def start_of(one: Layout) -> Path:
        name = f"parity-{one.vocab_size}-{one.precision}-{one.optimizer}"
        return once(name, partial(parity.write_start, single=one.single))

    def kind(one: Layout) -> tuple[object, ...]:
        return one.processes, one.single

    group = QUICK if layout in QUICK else [one for one in GRID if one not in QUICK and kind(one) == kind(layout)]
    starts = [start_of(one) for one in group]
    run_all = partial(parity.run_layouts, layouts=group, starts=starts)
    rest = f"{layout.processes}-{layout.vocab_size}-{layout.precision}-{layout.optimizer}"
    name = "quick" if layout in QUICK else rest
    return once(f"parity-layouts-{name}", run_all) / str(group.index(layout)), starts[group.index(layout)]


def tolerance(layout: Layout) -> dict[str, float]:
    """In 16 bits all sums are rounded, and gradients are a few roundings apart."""
    if layout.precision == "float32":
        return TOLERANCE
    eps = torch.finfo(getattr(torch, layout.precision)).eps
    return {"loss": eps, "norm": eps, "valid": eps, "course": 8 * eps}


@CELLS
def test_a_layout_equals_the_single_process(layout: Layout, once: Once) -> None:
    """Also after it resumed the previous layout's checkpoint; each rank holds only its shard."""
    run, start = runs_of(layout, once)
    (alone,), allowed = parity.ranks_of(start / "single"), tolerance(layout)
    if (run / "alone").exists():  # of the last layout
        (one,) = parity.ranks_of(run / "alone")
        assert one["loss"] == pytest.approx(alone["loss"], rel=allowed["loss"])
    logits = pytest.approx(alone["logits"], abs=10 * allowed["valid"] * max(map(abs, alone["logits"])))
    model = settings_of(run / "config.yaml").experiment("tiny")
    for rank, result in enumerate(parity.ranks_of(run)):
        if rank // layout.tensor % layout.data == 0:  # ranks are (pp, dp, tp); ZeRO's first rank is the fullest
            pipeline_rank, shares = rank // layout.tensor // layout.data, layout.data if layout.zero else 1
            assert result["parameters"] == held(model.model, plan.Layout.of(model), pipeline_rank, shares).total, rank
        assert result["logits"] == logits
    found = parity.differences(run, start)
    assert all(difference <= allowed.get(name, math.inf) for name, difference in found.items()), found


@CELLS
def test_what_a_layout_saved_becomes_the_single_process_in_every_format(
    layout: Layout, once: Once, tmp_path: Path
) -> None:
    run, start = runs_of(layout, once)
    saved, folder, megatron, again = (
        parity.saved_in(run),
        *(tmp_path / name for name in ("merged", "megatron", "again")),
    )
    assert run_main(verify.main, saved) == 0
    assert run_main(merge_mp.main, "--checkpoint", saved, "--output", folder) == 0
    expected = checkpoint.load_weights(checkpoint.resolve(parity.saved_in(start / "single")))
    found = parity.distance(merged(open_source(folder)), expected, start)
    allowed = tolerance(layout)
    assert all(difference <= allowed.get(name, math.inf) for name, difference in found.items()), found

    data, result = start / "dataset", tmp_path / "result.json"
    words = ("--checkpoint", folder, "--data", data, "--part", "valid", "--output", result)
    assert run_main(evaluate.main, *words) == 0
    valid = parity.ranks_of(run)[0]["valid"]
    assert read_json(result)["loss"] == pytest.approx(valid, rel=allowed["valid"])

    form = ("v3", "--pp", 5) if layout.zero % 2 else ("torch_dist",)
    assert run_main(to_megatron.main, "--checkpoint", saved, "--output", megatron, "--tp", 2, "--format", *form) == 0
    assert run_main(merge_mp.main, "--checkpoint", megatron, "--output", again) == 0
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
