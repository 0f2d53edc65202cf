"""One process of a job with a layer on each pipeline stage that overflows; prints the first of them."""

from pathlib import Path

import torch

from tests.training.helpers import settings_of
from training.diagnosis import first_non_finite
from training.distributed import read_launch, started
from training.plan import make_plan
from training.session import open_session
from training.step import step_batches, train_step


def main(argv: list[str]) -> int:
    with started(read_launch(), Path(argv[0]).parent) as world:
        session = open_session(make_plan(settings_of(Path(argv[0])), "tiny"), world)
        with torch.no_grad():
            for name in {"h.1.mlp.c_fc.weight", "h.3.mlp.c_fc.weight"} & session.parameters.keys():
                session.parameters[name].fill_(1e38)
        steps = step_batches(session, 0)
        batches = next(steps)
        steps.close()
        train_step(session, 1, batches, 0.01, accepts=lambda loss, norm: False)
        print(first_non_finite(session, batches))
    return 0
