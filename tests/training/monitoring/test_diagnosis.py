"""Non-finite numbers are traced to the module where they begin."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import Session, make_session, step_batches
from training.step import train_step
from training.trainer import _find_non_finite


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return make_session(tmp_path, model={"n_layer": 12})  # layer 2 comes before layer 10


def after_a_step(session: Session) -> str:
    """The diagnosis of a step that is not taken."""
    steps = step_batches(session, 0)
    batches = next(steps)
    steps.close()
    train_step(session, 1, batches, 0.01, accepts=lambda loss, norm: False)
    return _find_non_finite(session, batches)


def test_a_parameter_is_named_before_what_it_spoils_and_otherwise_the_first_layer_that_overflows(
    session: Session,
) -> None:
    with torch.no_grad():
        session.parameters["h.2.mlp.c_fc.weight"].fill_(1e38)
        session.parameters["h.10.mlp.c_fc.weight"].fill_(1e38)
    assert after_a_step(session) == "the output of h.2.mlp.c_fc"
    with torch.no_grad():
        session.parameters["h.10.mlp.c_fc.bias"][3] = torch.nan
        session.parameters["h.2.attn.c_proj.weight"][0, 0] = torch.inf
    assert after_a_step(session) == "parameter h.2.attn.c_proj.weight"


def test_after_a_finite_forward_pass_the_gradient_nearest_to_the_loss_is_named(session: Session) -> None:
    for name in ("h.2.ln_1.bias", "h.10.ln_1.bias", "wte.weight"):
        session.parameters[name].register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    assert after_a_step(session) == "the gradient of h.10.ln_1.bias"
