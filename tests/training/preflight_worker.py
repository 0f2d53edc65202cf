"""One process of a job that makes its preflight; each rank is a node of its own, and the last one has a fault.

`skew`: its clock is a minute ahead. `blind`: it does not see the folder. `silent`: it never answers.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace

from tests.training.helpers import settings_of
from training.parallel import preflight
from training.parallel.launch import read_launch


def main(argv: list[str]) -> int:
    config, fault = Path(argv[0]), argv[1]
    launch = read_launch()
    os.environ["SLURMD_NODENAME"] = f"node{launch.rank + 1}"
    preflight._VISIBLE = 0.5
    if fault == "silent":
        preflight._PATIENCE = 1.0
    if launch.rank == launch.world_size - 1:
        if fault == "skew":
            clock = SimpleNamespace(**vars(time))
            clock.time = lambda: time.time() + 60
            preflight.time = clock  # type: ignore[attr-defined]
        elif fault == "blind":
            preflight._is_visible = lambda path, text, real=preflight._is_visible: real(path / "elsewhere", text)  # type: ignore
        elif fault == "silent":
            preflight._look = lambda *_: time.sleep(60)  # type: ignore[assignment]
    return preflight.run_preflight(settings_of(config), "tiny")
