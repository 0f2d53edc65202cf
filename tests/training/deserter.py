"""A job whose rank 1 dies while rank 0 waits for it."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from training.parallel.launch import read_launch
from training.parallel.process_group import started


def main(argv: list[str]) -> int:
    with started(read_launch(), Path(argv[0])) as world:
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))
    return 0
