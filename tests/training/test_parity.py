"""Every layout equals the single process in losses, norms and weights, and each rank holds only its shard."""

from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Once
from tests.training import parity
from tests.training.parity import LAYOUTS, QUICK, TOLERANCE, Layout

STEPS = 4


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=str(layout), marks=[pytest.mark.slow] * (layout not in QUICK)) for layout in LAYOUTS],
)
def test_a_layout_equals_the_single_process(layout: Layout, once: Once, tmp_path: Path) -> None:
    size = layout.vocab_size
    start = once(f"parity-{size}", partial(parity.write_start, vocab_size=size, iterations=STEPS))
    seen = parity.run_layout(layout, start, tmp_path, STEPS)
    single = parity.read_run(start / "single", STEPS)
    for rank, result in enumerate(seen.ranks):
        assert result["shapes"] == parity.expected_shapes(layout, rank), rank
        expected = single.ranks[0]["logits"]
        assert result["logits"] == pytest.approx(expected, abs=TOLERANCE["weights"] * max(map(abs, expected)))
    for name, difference in parity.differences(seen, single).items():
        assert difference <= TOLERANCE[name], name
