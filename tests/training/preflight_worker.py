"""One process of a job that makes its preflight; each rank is a node of its own, and the last one has a fault.

`odd`: it has too many threads. `full`: its disk has no space. `blind`: it does not see the folder. `silent`: it never
answers.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from tests.training.helpers import settings_of
from training.launch import preflight
from training.launch.rank import read_launch


def main(argv: list[str]) -> int:
    config, fault = Path(argv[0]), argv[1]
    launch = read_launch()
    os.environ["SLURMD_NODENAME"] = f"node{launch.rank + 1}"
    preflight._VISIBLE = 0.5
    if fault == "silent":
        preflight._PATIENCE = 1.0
    if launch.rank == launch.world_size - 1:
        if fault in ("odd", "full"):
            changed = {"threads": 10**9} if fault == "odd" else {"disk_free": 0}
            preflight._look = lambda *seen, real=preflight._look: replace(real(*seen), **changed)  # type: ignore
        elif fault == "blind":
            preflight._is_visible = lambda path, text, real=preflight._is_visible: real(path / "elsewhere", text)  # type: ignore
        elif fault == "silent":
            preflight._look = lambda *_: time.sleep(60)  # type: ignore[assignment]
    return preflight.run_preflight(settings_of(config), "tiny")
