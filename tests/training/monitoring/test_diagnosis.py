"""Non-finite numbers are traced to the module where they begin."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import Session, launch_ok, make_run, open_session, settings_of, step_batches
from training.parallel.process_group import World
from training.run_plan import make_plan
from training.step import train_step
from training.trainer import _find_non_finite

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    config = make_run(tmp_path, model={"n_layer": 12})  # layer 2 comes before layer 10
    return open_session(make_plan(settings_of(config), "tiny"), ALONE)


def after_a_step(session: Session) -> str:
    """The diagnosis of a step that is not taken."""
    steps = step_batches(session, 0)
    batches = next(steps)
    steps.close()
    train_step(session, 1, batches, 0.01, accepts=lambda loss, norm: False)
    return _find_non_finite(session, batches)


def test_a_parameter_is_named_before_what_it_spoils(session: Session) -> None:
    with torch.no_grad():
        session.parameters["h.10.mlp.c_fc.bias"][3] = torch.nan
        session.parameters["h.2.attn.c_proj.weight"][0, 0] = torch.inf
    assert after_a_step(session) == "parameter h.2.attn.c_proj.weight"


def test_the_first_layer_whose_output_overflows_is_named(session: Session) -> None:
    with torch.no_grad():
        session.parameters["h.2.mlp.c_fc.weight"].fill_(1e38)
        session.parameters["h.10.mlp.c_fc.weight"].fill_(1e38)
    assert after_a_step(session) == "the output of h.2.mlp.c_fc"


def test_after_a_finite_forward_pass_the_gradient_nearest_to_the_loss_is_named(session: Session) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.inf)

    for name in ("h.2.ln_1.bias", "h.10.ln_1.bias", "wte.weight"):
        session.parameters[name].register_hook(spoil)
    assert after_a_step(session) == "the gradient of h.10.ln_1.bias"


def test_all_ranks_of_a_pipeline_name_the_same_layer(tmp_path: Path) -> None:
    config = make_run(tmp_path, model={"n_layer": 4}, parallel={"pipeline": 2, "data": 2})
    for result in launch_ok(4, "tests.training.spoiler", config, "forward"):
        assert result.stdout == "the output of h.1.mlp.c_fc\n"
