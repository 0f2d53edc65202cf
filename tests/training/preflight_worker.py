"""One process of a job that makes its preflight; each rank is a node of its own, and the last one has a fault.

`odd`: it has too many threads. `full`: its disk has no space.
"""

import os
from dataclasses import replace
from pathlib import Path

from tests.training.helpers import settings_of
from training.launch import preflight
from training.launch.rank import read_launch


def main(argv: list[str]) -> int:
    config, fault = Path(argv[0]), argv[1]
    launch = read_launch()
    os.environ["SLURMD_NODENAME"] = f"node{launch.rank + 1}"
    if launch.rank == launch.world_size - 1:
        changed = {"threads": 10**9} if fault == "odd" else {"disk_free": 0}
        preflight._inspect = lambda *seen, real=preflight._inspect: replace(real(*seen), **changed)  # type: ignore
    return preflight.run_preflight(settings_of(config), "tiny")
