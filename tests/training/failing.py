"""A training job in which rank 1 fails alone, or all ranks do, at the place that the last argument names."""

import errno
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, InputError
from training import loop, train
from training.checkpoint import saver, writing
from training.parallel.distributed import read_launch

GOOD = {"start": train.make_plan, "build": loop.open_session, "data": loop.step_batches, "step": loop.train_step}


def main(argv: list[str]) -> int:
    *argv, where = argv
    rank = read_launch().rank
    alone = rank == 1

    def start(*arguments: Any) -> Any:
        if alone:
            raise InputError("corpus.bin: no such file")
        return GOOD["start"](*arguments)

    def build(*arguments: Any) -> Any:
        raise ConfigError("no such layer on this device")  # on all ranks

    def data(*arguments: Any) -> Any:
        for number, batches in enumerate(GOOD["data"](*arguments)):
            if number == 2 and alone:
                raise InputError("corpus.bin: holds token id 999, outside the vocabulary of 257")
            yield batches

    def step(*arguments: Any) -> Any:
        if alone and arguments[1] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd so on.")
        return GOOD["step"](*arguments)

    def save(folder: Path, *_rest: Any) -> Any:
        if alone:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "__1_0.distcp"))
        return write(folder, *_rest)

    def defect(*arguments: Any) -> Any:
        if alone:
            raise ZeroDivisionError("division by zero")
        return GOOD["step"](*arguments)

    write = writing._write_tensors
    if where == "start":
        train.make_plan = start
    elif where == "build":
        loop.open_session = build
    elif where == "data":
        loop.step_batches = data  # type: ignore[assignment]
    elif where in ("step", "defect"):
        loop.train_step = {"step": step, "defect": defect}[where]
    elif where == "save":
        writing._write_tensors = save
    assert saver.checkpoint is not None
    return train.main(argv)
