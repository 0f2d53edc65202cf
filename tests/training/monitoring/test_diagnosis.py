"""Non-finite numbers are traced to the module where they begin."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import Session, launch_ok, make_run, make_session
from tests.training.spoiler import diagnosis_of_a_step


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return make_session(tmp_path, model={"n_layer": 12})  # layer 2 comes before layer 10


def test_a_parameter_is_named_before_what_it_spoils(session: Session) -> None:
    with torch.no_grad():
        session.parameters["h.10.mlp.c_fc.bias"][3] = torch.nan
        session.parameters["h.2.attn.c_proj.weight"][0, 0] = torch.inf
    assert diagnosis_of_a_step(session) == "parameter h.2.attn.c_proj.weight"


def test_the_first_layer_whose_output_overflows_is_named(session: Session) -> None:
    with torch.no_grad():
        session.parameters["h.2.mlp.c_fc.weight"].fill_(1e38)
        session.parameters["h.10.mlp.c_fc.weight"].fill_(1e38)
    assert diagnosis_of_a_step(session) == "the output of h.2.mlp.c_fc"


def test_after_a_finite_forward_pass_the_gradient_nearest_to_the_loss_is_named(session: Session) -> None:
    for name in ("h.2.ln_1.bias", "h.10.ln_1.bias", "wte.weight"):
        session.parameters[name].register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    assert diagnosis_of_a_step(session) == "the gradient of h.10.ln_1.bias"


@pytest.mark.slow
def test_all_ranks_of_a_pipeline_name_the_same_layer(tmp_path: Path) -> None:
    config = make_run(tmp_path, model={"n_layer": 4}, parallel={"pipeline": 2, "data": 2})
    for result in launch_ok(4, "tests.training.spoiler", config, "forward"):
        assert result.stdout == "the output of h.1.mlp.c_fc\n"
