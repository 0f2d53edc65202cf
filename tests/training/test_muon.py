"""Muon: its steps, which parameters it has, and runs that begin or resume with it. Layouts are in
test_parity.py.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.settings import Experiment, ModelSettings
from tests.numerics import assert_close
from tests.training.helpers import (
    Capsys,
    make_run,
    make_session,
    open_session,
    refusal,
    save_checkpoint,
    settings_of,
    step_batches,
    train_tiny,
)
from training import checkpoint
from training.checkpoint import Progress
from training.model import GPT2
from training.muon import Muon, orthogonal
from training.optimizer import make_optimizer
from training.planning.run import make_plan
from training.step import train_step
from training.train import main

MODEL = ModelSettings(n_layer=1, n_head=2, n_embd=8, seq_len=4, vocab_size=16)


def experiment(**train: Any) -> Experiment:
    return Experiment(model=MODEL, train={"iterations": 1, "optimizer": "muon", **train})


def polar(matrix: Tensor) -> Tensor:
    """Newton-Schulz by singular values, in float64: each goes through the quintic five times."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8)])
def test_newton_schulz_maps_singular_values_by_its_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    for found, one in zip(orthogonal(matrix), matrix, strict=True):
        assert_close(found, polar(one), terms=30 * shape[0] * shape[1])


def test_two_steps_are_those_of_torchs_muon_with_queries_keys_and_values_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    names = {"h.0.attn.c_attn.weight": (24, 8), "h.0.mlp.c_fc.weight": (32, 8), "h.0.mlp.c_proj.weight": (8, 32)}
    ours = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in names.items()}
    heads = ours["h.0.attn.c_attn.weight"].detach().view(2, 3, 4, 8)  # [head, (q, k, v), dim]
    theirs = [nn.Parameter(heads[:, part].reshape(8, 8).clone()) for part in range(3)]
    theirs += [nn.Parameter(ours[name].detach().clone()) for name in list(names)[1:]]
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    muon = Muon(ours, dict.fromkeys(names, 0.3), momentum=0.9, n_head=2, mesh=None)
    exp_avgs = [torch.zeros_like(each, requires_grad=False) for each in muon.matrices]
    before = [each.detach().clone() for each in theirs]
    for _ in range(2):
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
        parts = [*gradients["h.0.attn.c_attn.weight"].view(2, 3, 4, 8).unbind(1), *list(gradients.values())[1:]]
        for parameter, gradient in zip(theirs, parts, strict=True):
            parameter.grad = gradient.reshape(parameter.shape).clone()
        reference.step()
        with torch.no_grad():
            muon.step(exp_avgs, [gradients[name] for name in muon.names], rate=0.1)
    heads = ours["h.0.attn.c_attn.weight"].detach().view(2, 3, 4, 8)
    found = [*(heads[:, part].reshape(8, 8) for part in range(3)), *(ours[name].detach() for name in list(names)[1:])]
    for mine, expected, start in zip(found, theirs, before, strict=True):  # torch iterates in bfloat16
        assert (mine - expected).norm() < 0.02 * (expected - start).norm()


def test_muon_has_the_matrices_of_the_layers_and_adamw_its_own_rate_for_the_rest() -> None:
    named = dict(GPT2(MODEL).named_parameters())
    optimizer = make_optimizer(named, experiment(lr=0.1, adamw_lr=0.02, weight_decay=0.5))
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer.step(0.05, torch.ones(()))
    states = {name: {*optimizer.state[parameter]} for name, parameter in named.items()}
    matrices = {name for name in named if name.startswith("h.") and named[name].dim() == 2}
    assert {name for name, state in states.items() if "exp_avg_sq" not in state} == matrices
    assert all({"step", "exp_avg"} <= state for state in states.values())
    assert all(float(state["step"]) == 1 for state in optimizer.state.values())
    # the first step of AdamW has the size of its rate, a fifth of Muon's; biases do not decay
    assert torch.allclose(before["ln_f.bias"] - named["ln_f.bias"], torch.full((8,), 0.01))
    ones = 0.05 * 0.2 * 8**0.5 * polar(torch.ones(8, 8)).float()  # c_proj of attention
    expected = before["h.0.attn.c_proj.weight"] * (1 - 0.05 * 0.5) - ones
    assert torch.allclose(named["h.0.attn.c_proj.weight"], expected, atol=1e-5)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = make_session(tmp_path, train={"optimizer": "muon"})
    resumed = open_session(whole.plan)
    folder = tmp_path / "models/tiny"
    with closing(step_batches(whole, 0)) as batches:
        for iteration in range(1, 5):
            train_step(whole, iteration, next(batches), 0.01)
            if iteration == 2:
                save_checkpoint(folder, whole.parameters, whole.optimizer, Progress(2, 16), whole.plan)
    checkpoint.load(checkpoint.resolve(folder), resumed.parameters, resumed.optimizer)
    with closing(step_batches(resumed, 16)) as batches:
        for iteration in (3, 4):
            train_step(resumed, iteration, next(batches), 0.01)
    assert all(torch.equal(whole.parameters[name], each) for name, each in resumed.parameters.items())


def test_a_run_changes_from_adamw_to_muon_only_if_told_to_and_never_back(tmp_path: Path, capsys: Capsys) -> None:
    config = make_run(tmp_path)
    words = ("--config", config, "--model", "tiny", "train.iterations=5")
    assert train_tiny(config) == 0
    line = refusal(capsys, main, *words, "train.optimizer=muon")
    assert "the moments of adamw" in line and "train.allow_optimizer_change" in line
    assert train_tiny(config, "train.iterations=5", "train.optimizer=muon", "train.allow_optimizer_change=true") == 0
    session = open_session(make_plan(settings_of(config), "tiny"))
    before = checkpoint.read_manifest(tmp_path / "models/tiny/iter_0000004")
    checkpoint.load(before, session.parameters, session.optimizer)
    assert "the moments of muon" in refusal(capsys, main, *words[:-1], "train.iterations=6")
