"""The learning-rate schedules, the weight-decay groups, and AdamW's step."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from common.settings import Experiment, ModelSettings, TrainSettings
from training.kernels.adamw import reference_adamw_
from training.model import GPT2
from training.optimizer import learning_rate, make_optimizer

TINY = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=4, vocab_size=16)


def rates(count: int, **train: Any) -> list[float]:
    settings = TrainSettings(**{"iterations": count, "lr": 1.0, **train})
    return [learning_rate(iteration, settings) for iteration in range(count)]


def test_each_schedule_has_the_published_values() -> None:
    cosine = rates(100, min_lr=0.1, warmup=0.1)
    assert (cosine[0], cosine[9], cosine[10], cosine[99]) == pytest.approx((0.1, 1.0, 1.0, 0.1))
    assert cosine[10 + 89 // 2] == pytest.approx(0.55, abs=0.02) and cosine[98] > 0.1
    linear = rates(21, min_lr=0.0, warmup=0, lr_decay="linear")
    assert (linear[0], linear[5], linear[10], linear[20]) == (1.0, 0.75, 0.5, 0.0)
    root = rates(1000, min_lr=0.25, warmup_iterations=10, lr_decay="inverse_sqrt")
    assert (root[9], root[10], root[39]) == (1.0, pytest.approx(math.sqrt(10 / 11)), 0.5)
    assert set(root[159:]) == {0.25}
    assert set(rates(50, warmup_iterations=5, lr_decay="constant")[4:]) == {1.0}
    held = rates(100, min_lr=0.1, warmup_iterations=10, decay_iterations=40)
    assert held[38] > held[39] == 0.1 and set(held[39:]) == {0.1}
    assert rates(100, warmup=0.5, warmup_iterations=4)[:4] == [0.25, 0.5, 0.75, 1.0]  # the number wins over the share


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_stays_at_lr_and_falls_over_its_last_iterations_in_the_given_shape(shape: str) -> None:
    found = rates(60, min_lr=0.2, warmup_iterations=5, lr_decay="wsd", cooldown_iterations=11, cooldown=shape)
    left = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "sqrt": lambda x: 1 - x**0.5,
    }
    fall = [0.2 + 0.8 * left[shape](number / 10) for number in range(11)]
    assert found == pytest.approx([*(0.2 * number for number in range(1, 6)), *[1.0] * 44, *fall])
    assert rates(100, min_lr=0.2, warmup=0, lr_decay="wsd")[89:91] == pytest.approx([1.0, 1.0])  # a tenth of 100
    shorter = rates(200, min_lr=0.2, warmup=0, lr_decay="wsd", decay_iterations=50)
    assert shorter[45:47] == [1.0, pytest.approx(0.8)] and shorter[49] == 0.2  # a tenth of 50


def test_a_cosine_with_cycles_begins_again_at_lr_whatever_the_length_of_the_run() -> None:
    cycle = [0.1 + 0.45 * (1 + math.cos(math.pi * number / 9)) for number in range(10)]
    for count in (25, 60):
        found = rates(count, min_lr=0.1, warmup_iterations=5, cycle_iterations=10)
        assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, *(cycle * 6)[: count - 6], 0.1])


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_a_schedule_that_falls_ends_at_min_lr_whatever_the_lengths(decay: str) -> None:
    for count in range(1, 21):
        for warmup in range(1, count):
            found = rates(count, min_lr=0.1, warmup_iterations=warmup, lr_decay=decay)
            assert found[warmup - 1] == 1.0 and found[-1] == 0.1
        for more in ({"cycle_iterations": 1}, {"cycle_iterations": 3}, {"cooldown_iterations": 1}):
            found = rates(count, min_lr=0.1, warmup=0, lr_decay=decay, **more)
            assert found[-1] == 0.1 and (count == 1 or found[0] == 1.0)
    assert rates(4, warmup_iterations=4, lr_decay=decay)[-1] == 1.0


@pytest.mark.parametrize("patterns", [None, ["*.bias", "*ln_*", "w?e.weight"], [], ["*"]])
def test_parameters_that_no_decay_names_do_not_decay_by_default_those_of_one_dimension(patterns: Any) -> None:
    named, given = dict(GPT2(TINY).named_parameters()), {} if patterns is None else {"no_decay": patterns}
    train = TrainSettings(iterations=1, weight_decay=0.5, **given)
    groups = {
        group["weight_decay"]: list(map(id, group["params"]))
        for group in make_optimizer(named, Experiment(model=TINY, train=train)).param_groups
    }
    spared = [id(p) for name, p in named.items() if patterns == ["*"] or (patterns != [] and p.dim() == 1)
              or (patterns and name in ("wte.weight", "wpe.weight"))]  # fmt: skip
    assert groups.get(0.0, []) == spared
    assert groups.get(0.5, []) == [id(p) for p in named.values() if id(p) not in spared]


@pytest.mark.parametrize("kernel", [False, True])
def test_two_steps_equal_the_papers_with_the_configured_betas_eps_and_decay(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loshchilov and Hutter 2019, algorithm 2; eps is large so that it shows. Also by our kernel's
    arithmetic.
    """
    monkeypatch.setattr("training.optimizer.library.selected", lambda *_: kernel)
    monkeypatch.setattr("training.optimizer.adamw_", reference_adamw_)
    train = TrainSettings(iterations=1, lr=0.1, betas=(0.5, 0.75), eps=0.3, weight_decay=0.2)
    matrix, bias = nn.Parameter(torch.full((2, 2), 3.0)), nn.Parameter(torch.full((2,), 3.0))
    optimizer = make_optimizer({"wte.weight": matrix, "ln_f.bias": bias}, Experiment(model=TINY, train=train))
    expected, moments = {0.2: 3.0, 0.0: 3.0}, [0.0, 0.0]
    for step, gradient in enumerate((2.0, -1.0), start=1):
        matrix.grad, bias.grad = torch.full_like(matrix, gradient), torch.full_like(bias, gradient)
        optimizer.step(0.1, torch.ones(()))
        moments = [0.5 * moments[0] + 0.5 * gradient, 0.75 * moments[1] + 0.25 * gradient**2]
        update = (moments[0] / (1 - 0.5**step)) / (math.sqrt(moments[1] / (1 - 0.75**step)) + 0.3)
        expected = {decay: value * (1 - 0.1 * decay) - 0.1 * update for decay, value in expected.items()}
    assert matrix.detach().flatten().tolist() == pytest.approx([expected[0.2]] * 4)
    assert bias.tolist() == pytest.approx([expected[0.0]] * 2)
