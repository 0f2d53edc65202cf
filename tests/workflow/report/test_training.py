import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.settings import Experiment
from tests.workflow.report.fake_run import finished_run
from workflow.report.models import read_curve, trained_models
from workflow.report.training import HOVERS, POINTS, curve_charts, thin

TRAIN = {"iterations": 5, "clip_grad": 0.5}


@pytest.mark.parametrize("size", [0, 1, POINTS, POINTS + 1, 10_000])
def test_thinning_keeps_the_ends_and_every_extreme(size: int) -> None:
    values = np.random.default_rng(1).normal(size=size)
    if size > 100:
        values[size // 3], values[size // 2], values[7] = 99, -99, np.nan
    kept = thin(values)
    assert len(kept) <= POINTS and (np.diff(kept) > 0).all() and np.isfinite(values[kept]).all()
    if size:
        assert (kept[0], kept[-1]) == (0, size - 1)
        assert (values[kept].max(), values[kept].min()) == (np.nanmax(values), np.nanmin(values))


def test_a_curve_is_read_without_its_incomplete_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("iteration,lm_loss,mfu\n10,9.5,\n20,nan,0.5\n30,7.")
    curve = read_curve(path)
    assert curve.values("iteration").tolist() == [10, 20] and len(curve) == 2
    assert np.isnan(curve.values("mfu")[0]) and not len(curve.values("grad_norm"))
    path.write_bytes(b"iteration,lm_loss\n5,9.5\n10,x\n15\n20,8.5\n" + bytes(99) + b"\n")  # a power cut leaves anything
    assert read_curve(path).values("iteration").tolist() == [5, 20]


def test_models_lie_over_each_other_with_values_and_restarts(tmp_path: Path) -> None:
    models = trained_models(finished_run(tmp_path, rows=500, models=("small", "tiny")))
    charts = curve_charts(models)
    assert [caption.split()[0] for caption, _ in charts] == ["Loss,", "Learning", "Gradient", "Tokens"]
    for _, svg in charts:
        titles = re.findall("<title>([^<]*)</title>", svg)
        assert len(titles) <= HOVERS + 2 * len(models)
        for name in ("small", "tiny"):
            assert f"{name}: started again from iteration 2,500" in titles
            assert any(re.fullmatch(rf"{name}( training)?: [\d.,e-]+ at [\d,]+ tokens", title) for title in titles)
    assert "tiny validation: 6.5 at 10,240 tokens" in charts[0][1]
    experiment = Experiment.model_validate({"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": TRAIN})
    (norm,) = curve_charts([replace(models[0], experiment=experiment)], {"grad_norm": "Gradient norm"})
    assert "clipped to 0.5" in norm[1]
