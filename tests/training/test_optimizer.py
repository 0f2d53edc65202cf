"""Learning rate and decay groups."""

from itertools import pairwise

import pytest
import torch

from common.settings import ModelSettings, TrainSettings
from training.model import GPT2
from training.optimizer import learning_rate, make_optimizer

TRAIN = TrainSettings(iterations=100, lr=1.0, min_lr=0.1, warmup=0.1)


def test_the_rate_rises_over_the_warm_up_and_falls_to_its_minimum_at_the_last_iteration() -> None:
    rates = [learning_rate(iteration, TRAIN) for iteration in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert all(earlier >= later for earlier, later in pairwise(rates[10:]))
    assert rates[10 + 89 // 2] == pytest.approx(0.55, abs=0.02)


def test_the_rate_never_rises_again_past_the_end() -> None:
    assert learning_rate(100, TRAIN) == learning_rate(150, TRAIN) == pytest.approx(0.1)


def test_a_run_without_warm_up_begins_at_the_peak() -> None:
    assert learning_rate(0, TrainSettings(iterations=1, lr=1.0, warmup=0.0)) == 1.0


def test_biases_and_norms_do_not_decay() -> None:
    model = GPT2(ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=4, vocab_size=16))
    optimizer = make_optimizer(model.parameters(), TrainSettings(iterations=1, weight_decay=0.5))
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5 and spared["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in spared["params"]} == {n for n in names.values() if n.endswith("bias") or "ln_" in n}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_the_ready_made_state_is_the_one_that_adamw_would_make() -> None:
    settings = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=4, vocab_size=16)
    weights = GPT2(settings).state_dict()
    results = []
    for ready in (True, False):
        model = GPT2(settings)
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
