"""The learning-rate schedules, the weight-decay groups, and AdamW's step."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from common.settings import ModelSettings, TrainSettings
from training.model import GPT2
from training.optimizer import learning_rate, make_optimizer, rate_change

TRAIN = TrainSettings(iterations=100, lr=1.0, min_lr=0.1, warmup=0.1)
TINY = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=4, vocab_size=16)

schedules = st.fixed_dictionaries(
    {
        "iterations": st.integers(1, 300),
        "lr": st.floats(1e-6, 1.0),
        "min_lr": st.sampled_from([0.0, 1e-7, 1e-6]),
        "warmup": st.floats(0, 1),
        "warmup_iterations": st.integers(0, 60),
        "lr_decay": st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt"]),
    }
).map(lambda values: TrainSettings(**values))


def test_the_rate_rises_over_the_warm_up_and_falls_to_its_minimum_at_the_last_iteration() -> None:
    rates = [learning_rate(iteration, TRAIN) for iteration in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert rates[10 + 89 // 2] == pytest.approx(0.55, abs=0.02)


def test_a_run_without_warm_up_begins_at_the_peak() -> None:
    assert learning_rate(0, TrainSettings(iterations=1, lr=1.0, warmup=0.0)) == 1.0


@given(schedules)
def test_every_schedule_rises_to_the_peak_and_never_again(train: TrainSettings) -> None:
    rates = [learning_rate(iteration, train) for iteration in range(2 * train.iterations + 100)]
    rise, fall = rates[: train.warmup_end], rates[train.warmup_end :]
    assert rise == pytest.approx([train.lr * (place + 1) / train.warmup_end for place in range(len(rise))])
    assert all(earlier >= later for earlier, later in pairwise(fall))
    assert all(train.min_lr <= rate <= train.lr * (1 + 1e-12) for rate in fall)
    if train.lr_decay == "constant":
        assert set(fall) == {train.lr}
        return
    assert set(rates[max(train.iterations, train.warmup_end) :]) == {train.min_lr}
    if train.lr_decay != "inverse_sqrt" and train.iterations > train.warmup_end + 1:
        assert (fall[0], rates[train.iterations - 1]) == (pytest.approx(train.lr), train.min_lr)


@given(schedules)
def test_no_schedule_jumps(train: TrainSettings) -> None:
    """The rate changes between two steps by at most the steepest slope of the curve."""
    first, last = train.warmup_end, train.iterations - 1
    slopes = {
        "cosine": math.pi / 2 / max(1, last - first),
        "linear": 1 / max(1, last - first),
        "constant": 0.0,
        "inverse_sqrt": 1 - math.sqrt(max(1, first) / (max(1, first) + 1)),
    }
    rates = [learning_rate(iteration, train) for iteration in range(max(0, first - 1), train.iterations)]
    steepest = train.lr * slopes[train.lr_decay] * (1 + 1e-9) + 1e-15
    assert all(earlier - later <= steepest for earlier, later in pairwise(rates))


def test_linear_decay_halves_the_rate_half_way() -> None:
    train = TrainSettings(iterations=21, lr=1.0, min_lr=0.0, warmup=0, lr_decay="linear")
    assert [learning_rate(iteration, train) for iteration in (0, 5, 10, 20)] == [1.0, 0.75, 0.5, 0.0]


def test_the_inverse_square_root_is_a_half_after_four_times_the_warm_up() -> None:
    train = TrainSettings(iterations=1000, lr=1.0, min_lr=0.25, warmup_iterations=10, lr_decay="inverse_sqrt")
    rates = [learning_rate(iteration, train) for iteration in range(1000)]
    assert (rates[9], rates[39]) == (1.0, 0.5)
    assert rates[10] == pytest.approx(math.sqrt(10 / 11))
    assert set(rates[159:]) == {0.25}


def test_the_minimum_is_held_from_decay_iterations_on() -> None:
    train = TrainSettings(iterations=100, lr=1.0, min_lr=0.1, warmup_iterations=10, decay_iterations=40)
    rates = [learning_rate(iteration, train) for iteration in range(100)]
    assert rates[38] > rates[39] == 0.1 and set(rates[39:]) == {0.1}
    assert rates[10 + 29 // 2] == pytest.approx(0.55, abs=0.05)


def test_the_number_of_warm_up_iterations_wins_over_their_share() -> None:
    train = TrainSettings(iterations=100, lr=1.0, warmup=0.5, warmup_iterations=4)
    assert [learning_rate(iteration, train) for iteration in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr": 1e-6}, "min_lr 1e-05 is above lr 1e-06"),
        ({"decay_iterations": 9, "warmup": 0.1}, "decay_iterations 9 is before the end of the warm-up, 10 iterations"),
        ({"decay_iterations": 9, "lr_decay": "constant"}, "lr_decay constant has no end"),
    ],
)
def test_rates_that_contradict_each_other_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainSettings(iterations=100, **given)


@given(schedules, st.integers(1, 3), st.integers(0, 300))
def test_the_suggested_keys_keep_the_rate_of_an_extended_run(before: TrainSettings, longer: int, taken: int) -> None:
    assume(before.warmup_end <= before.iterations)
    given = {key: getattr(before, key) for key in before.model_fields_set} | {"iterations": before.iterations * longer}
    now, taken = TrainSettings(**given), min(taken, before.iterations)
    message = rate_change(before, now, taken)
    if not message:
        assert learning_rate(taken, now) == pytest.approx(learning_rate(taken, before))
        return
    offered = dict(word.removeprefix("train.").split("=") for word in message.partition("to hold that: ")[2].split())
    held = TrainSettings(**(given | {key: float(value) for key, value in offered.items()}))
    assert not rate_change(before, held, taken)
    for step in range(taken, held.iterations):
        assert learning_rate(step, held) == pytest.approx(learning_rate(step, before)), step


def test_biases_and_layer_norms_do_not_decay() -> None:
    model = GPT2(TINY)
    optimizer = make_optimizer(model.parameters(), TrainSettings(iterations=1, weight_decay=0.5))
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5 and spared["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in spared["params"]} == {n for n in names.values() if n.endswith("bias") or "ln_" in n}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_the_preallocated_state_equals_the_one_that_adamw_makes() -> None:
    weights = GPT2(TINY).state_dict()
    results = []
    for ready in (True, False):
        model = GPT2(TINY)
        model.load_state_dict(weights)
        optimizer = make_optimizer(model.parameters(), TrainSettings(iterations=1, lr=0.1))
        if not ready:
            optimizer.state.clear()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in weights)


def test_two_steps_equal_the_papers_with_the_configured_betas_eps_and_decay() -> None:
    """Loshchilov and Hutter 2019, algorithm 2; eps is large so that it shows."""
    train = TrainSettings(iterations=1, lr=0.1, betas=(0.5, 0.75), eps=0.3, weight_decay=0.2)
    matrix, bias = nn.Parameter(torch.full((2, 2), 3.0)), nn.Parameter(torch.full((2,), 3.0))
    optimizer = make_optimizer([matrix, bias], train)
    expected, moments = {0.2: 3.0, 0.0: 3.0}, [0.0, 0.0]
    for step, gradient in enumerate((2.0, -1.0), start=1):
        matrix.grad, bias.grad = torch.full_like(matrix, gradient), torch.full_like(bias, gradient)
        optimizer.step()
        moments = [0.5 * moments[0] + 0.5 * gradient, 0.75 * moments[1] + 0.25 * gradient**2]
        update = (moments[0] / (1 - 0.5**step)) / (math.sqrt(moments[1] / (1 - 0.75**step)) + 0.3)
        expected = {decay: value * (1 - 0.1 * decay) - 0.1 * update for decay, value in expected.items()}
    assert matrix.detach().flatten().tolist() == pytest.approx([expected[0.2]] * 4)
    assert bias.tolist() == pytest.approx([expected[0.0]] * 2)


def test_the_fused_kernel_is_used_only_on_devices_that_have_it() -> None:
    train = TrainSettings(iterations=1)
    assert make_optimizer([nn.Parameter(torch.ones(2))], train).defaults["fused"] is True
    assert make_optimizer([nn.Parameter(torch.ones(2, device="meta"))], train).defaults["fused"] is False
