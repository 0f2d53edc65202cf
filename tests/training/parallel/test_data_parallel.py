"""ZeRO in every precision: what a rank keeps follows from the shapes, and all stages learn what one process learns."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.training.helpers import make_run, on_ranks, open_session, settings_of
from tests.training.memory_worker import PRECISIONS, RECOMPUTE, STAGES, course, in_precision, measured
from training.planning.run import make_plan

WIDTH, LAYERS, LENGTH = 80, 4, 24  # no activation, shard or pair of matrices has the shape of another matrix
HEAD = 384 * WIDTH  # elements of the token embedding, the vocabulary padded
ROOT = HEAD + LENGTH * WIDTH  # of both embeddings
LAYER = 12 * WIDTH**2  # of a layer's matrices: 3 + 1 for attention, 4 + 4 for the MLP


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=[pytest.mark.slow] * (name != "bfloat16")) for name in PRECISIONS]
)
def test_whole_weights_are_alive_only_where_the_stage_needs_them_and_all_learn_alike(
    tmp_path: Path, precision: str
) -> None:
    """Weights: in the type of the products, and once; stage 3: those of one layer at a time, embeddings and head.

    Stages differ by sums in another order, 1e-7. AdamW amplifies that, and from then on a weight may be rounded to the
    other side: by less than a unit roundoff. One process rounds the sum of the embeddings, ranks each of the two: the
    loss and the first norm differ by less than a unit roundoff, later norms by more.
    """
    model = {"n_layer": LAYERS, "n_embd": WIDTH, "seq_len": LENGTH, "dropout": 0.0}
    config = make_run(tmp_path, model=model, parallel={"data": 2})
    ranks = on_ranks(2, measured, config, precision)
    assert ranks[0] == ranks[1]
    size = getattr(torch, precision).itemsize
    for zero_stage, recompute in product(STAGES, RECOMPUTE):
        weights = ranks[0][f"{recompute} {zero_stage}"]
        gathered = ROOT if zero_stage == 3 else ROOT + LAYERS * LAYER
        assert weights["forward"] == (gathered + HEAD) * size  # the head's gradient exists, too
        assert weights["after"] == 0
        if zero_stage == 3:
            computed_again = recompute != "none"  # in the backward pass
            assert weights["within"] == (ROOT + LAYER + HEAD * computed_again) * size

    groups, parameters = LAYERS + 1, 12 * LAYERS + 4
    for zero_stage, count in product(STAGES, (1, 2)):  # micro-batches; stages 0 to 2 keep parameters between them
        gathers = (0, groups, groups, (2 * LAYERS + 1) * count)[zero_stage]
        sums = groups * (count if zero_stage >= 2 else 1)
        casts = 0 if zero_stage else parameters
        assert ranks[0][f"{zero_stage} traffic"][count - 1] == [gathers, sums, casts]

    first, *others = (ranks[0][f"{stage}"] for stage in STAGES)
    near = max(torch.finfo(getattr(torch, precision)).eps / 2, 1e-5)
    for other in others:
        assert tuple(other[0]) == pytest.approx(first[0], rel=1e-5)
        assert [*map(tuple, other)] == [pytest.approx(step, rel=near) for step in first]
    plan = make_plan(settings_of(config), "tiny")
    parallel = plan.experiment.parallel.model_copy(update={"data": 1})
    plan = replace(plan, experiment=plan.experiment.model_copy(update={"parallel": parallel}))
    alone = course(open_session(in_precision(plan, precision)))
    near = max(torch.finfo(getattr(torch, precision)).eps / 2, 1e-6)
    assert [loss for loss, _ in first] == pytest.approx([loss for loss, _ in alone], rel=near)
    assert first[0][1] == pytest.approx(alone[0][1], rel=near)
