"""A probe in which rank 1 alone runs out of memory (`memory`), or dies (`dies`); the last argument says which."""

import os
from typing import Any

import torch

from training import probe, step
from training.parallel.launch import read_launch


def main(argv: list[str]) -> int:
    *argv, how = argv
    real = step.train_step

    def train_step(*arguments: Any) -> Any:
        if read_launch().rank == 1 and how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd so on.")
        if read_launch().rank == 1:
            os._exit(9)
        return real(*arguments)

    step.train_step = train_step
    return probe.main(argv)
