"""Steps are judged by their loss and gradient norm: taken, skipped, or stopping the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.errors import TrainingError
from common.settings import Experiment
from tests.training.helpers import Capsys, make_run, train_tiny
from training.monitoring.guard import Guard


def guard(precision: str = "float32", state: dict[str, Any] | None = None, **watch: object) -> Guard:
    model = {"n_layer": 1, "n_head": 1, "n_embd": 8}
    train = {"iterations": 10, "precision": precision, "initial_loss_scale": 8, "loss_scale_window": 3}
    experiment = Experiment.model_validate({"model": model, "train": train, "watch": watch})
    return Guard(experiment.train, experiment.watch, state)


def where() -> str:
    return "h.3.mlp.c_fc"


def test_non_finite_steps_can_be_skipped_but_not_ten_in_a_row() -> None:
    judged = guard(non_finite="skip")
    for _ in range(2):
        for _ in range(9):
            assert not judged.judge(math.nan, 1.0)
            judged.check(1, where)
        assert judged.judge(3.0, 1.0)
    for _ in range(10):
        judged.check(1, where)
        judged.judge(2.0, math.inf)
    with pytest.raises(TrainingError, match="10th"):
        judged.check(1, where)


@pytest.mark.parametrize(("reaction", "taken"), [("warn", True), ("skip", False), ("stop", False)])
def test_a_loss_far_above_the_mean_of_the_last_hundred_is_a_spike(reaction: str, taken: bool) -> None:
    judged = guard(spike=0.5, spike_reaction=reaction)
    assert judged.judge(90.0, 1.0)  # the oldest of 101 no longer counts
    for _ in range(100):
        assert judged.judge(3.0, 1.0)
    assert judged.judge(3.5, 1.0) and not judged.spike  # exactly at the limit
    assert judged.judge(3.51, 1.0) is taken
    assert "3.5100 is 0.5050 nats above" in judged.spike
    if reaction == "stop":
        with pytest.raises(TrainingError, match="iteration 102") as raised:
            judged.check(102, where)
        assert "h.3" not in str(raised.value)
    else:
        judged.check(102, where)
    assert judged.judge(3.0, 1.0) and not judged.spike


def test_no_loss_is_a_spike_before_there_is_a_mean_or_when_it_is_switched_off() -> None:
    early, off = guard(spike=0.5, spike_reaction="skip"), guard(spike=0, spike_reaction="skip")
    assert all(early.judge(loss, 1.0) for loss in [3.0] * 99 + [100.0])
    assert all(off.judge(loss, 1.0) for loss in [3.0] * 200 + [100.0])


def test_float16_skips_overflows_and_stops_at_the_tenth_in_a_row_with_the_scale_at_its_floor() -> None:
    judged = guard("float16")
    scales = []
    for _ in range(4):
        scales.append(judged.scale)
        assert not judged.judge(math.inf, math.nan) and not judged.problem
    assert scales == [8, 8, 4, 2] and judged.scale == 1  # two overflows before the first halving
    for _ in range(3):
        for _ in range(9):
            judged.judge(math.inf, 1.0)
            judged.check(1, where)
        assert judged.judge(2.0, 1.0)  # restarts the count
    for overflow in range(1, 11):
        judged.check(1, where)
        judged.judge(math.inf, 1.0)
        assert bool(judged.problem) is (overflow == 10)  # it stops the run
    with pytest.raises(TrainingError, match="10 overflows"):
        judged.check(1, where)


def test_the_scale_doubles_after_a_clean_window_and_the_hysteresis_restarts() -> None:
    judged = guard("float16")
    judged.judge(math.inf, 1.0)
    seen = []
    for _ in range(7):
        judged.judge(2.0, 1.0)
        seen.append(judged.scale)
    assert seen == [8, 8, 16, 16, 16, 32, 32]
    judged.judge(math.inf, 1.0)
    assert judged.scale == 32
    judged.judge(math.inf, 1.0)
    assert judged.scale == 16


def test_a_resumed_run_judges_like_one_that_was_never_stopped() -> None:
    losses = [3.0] * 60 + [math.inf] + [2.9] * 60 + [math.nan, 9.0]
    straight = guard("float16", spike=0.5, spike_reaction="skip")
    resumed = guard("float16", spike=0.5, spike_reaction="skip")
    refused = 0
    for loss in losses:
        expected = straight.judge(loss, 1.0)
        state = json.loads(json.dumps(resumed.state()))
        resumed = guard("float16", state, spike=0.5, spike_reaction="skip")
        assert resumed.judge(loss, 1.0) is expected
        assert resumed.state() == straight.state()
        refused += not expected
    assert refused == 3


def test_a_run_whose_weights_explode_stops_in_one_line_with_its_last_checkpoint(tmp_path: Path, capsys: Capsys) -> None:
    config = make_run(tmp_path, train={"iterations": 9, "save_interval": 1, "lr": 1e30, "min_lr": 0, "warmup": 0})
    assert train_tiny(config) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "iteration 2: " in error and "first in the output of h.0." in error
    assert [path.name for path in (tmp_path / "models/tiny").glob("iter_*")] == ["iter_0000001"]
