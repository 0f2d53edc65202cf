"""Every layout equals the single process in losses, norms and weights, and each rank holds only its shard."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.training.parity import LAYOUTS, QUICK, TOLERANCE, Layout, Seen, differences, expected_shapes, run_layout
from tests.training.parity import write_seed as written_seed

# what a step of two micro-batches gathers and scatters, in groups: five layers and the rest of the model
GATHERED = {0: (0, 0), 1: (6, 6), 2: (6, 12), 3: (2 * (6 + 5), 12)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Seen]]:
    """The seed checkpoint of a vocabulary, and the single process's results from it."""

    @cache
    def made(vocab_size: int) -> tuple[Path, Seen]:
        seed = written_seed(tmp_path_factory.mktemp("start"), vocab_size)
        return seed, run_layout(Layout(vocab_size=vocab_size), seed, tmp_path_factory.mktemp("single") / "run")

    return made


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=str(layout), marks=[pytest.mark.slow] * (layout not in QUICK)) for layout in LAYOUTS],
)
def test_a_layout_equals_the_single_process(
    layout: Layout, start: Callable[[int], tuple[Path, Seen]], tmp_path: Path
) -> None:
    seed, single = start(layout.vocab_size)
    seen = run_layout(layout, seed, tmp_path)
    for rank, result in enumerate(seen.ranks):
        assert result["shapes"] == expected_shapes(layout, rank), rank
    if layout.tensor == layout.pipeline == 1:
        counts = seen.ranks[0]["collectives"]
        assert (
            tuple(counts.get(f"_{name}_base_", 0) for name in ("allgather", "reduce_scatter")) == GATHERED[layout.zero]
        )
    for name, difference in differences(seen, single).items():
        assert difference <= TOLERANCE[name], name
