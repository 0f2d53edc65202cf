"""A training job in which only rank 1 fails, or all ranks do; the last argument says where."""

import errno
import time
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, InputError
from training import train, trainer
from training.checkpoint import writing
from training.parallel import process_group
from training.parallel.launch import Launch, read_launch

GOOD = {
    "start": train.make_plan,
    "build": trainer.open_session,
    "data": trainer.step_batches,
    "step": trainer.train_step,
    "late": process_group.join_lifeline,  # type: ignore[attr-defined]
}


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

    def save(folder: Path, *rest: Any) -> Any:
        if alone:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "__1_0.distcp"))
        return write(folder, *rest)

    def defect(*arguments: Any) -> Any:
        if alone:
            raise ZeroDivisionError("division by zero")
        return GOOD["step"](*arguments)

    def late(launch: Launch, *rest: Any) -> Any:
        if alone:
            time.sleep(0.5)
        return GOOD["late"](launch, *rest)

    write = writing._write_tensors
    if where == "start":
        train.make_plan = start
    elif where == "build":
        trainer.open_session = build
    elif where == "data":
        trainer.step_batches = data  # type: ignore[assignment]
    elif where in ("step", "defect"):
        trainer.train_step = {"step": step, "defect": defect}[where]
    elif where == "late":
        process_group.join_lifeline = late  # type: ignore[attr-defined]
    elif where == "save":
        writing._write_tensors = save
    return train.main(argv)
