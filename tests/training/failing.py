"""A training or a trial of two ranks with a fault on rank 1 alone; the last argument names it."""

import errno
import os
import signal
import time
from collections.abc import Callable, Generator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from common.config import load_settings
from common.errors import InputError
from training import job, step, train, trainer
from training.checkpoint import writing
from training.launch.rank import read_launch
from training.monitoring.stop import Stop
from training.trial import run_trial

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd so on.")


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_arguments: object) -> None:
        raise error

    return fail


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # not print: a signal handler must not enter a buffer that is being flushed


def rank_1_hangs_here() -> None:
    tell("stalls")
    while True:
        time.sleep(0.1)  # a signal that arrives just before a sleep is handled after it


def before_the_third_step(act: Callable[[], Any]) -> None:
    """Call `act` where the batch of the third step is read."""
    real = job.step_batches

    def batches(*arguments: Any) -> Generator[Any, None, None]:
        yield from islice(real(*arguments), 2)
        act()

    job.step_batches = batches  # type: ignore[assignment]


def tell_signals() -> None:
    """Print each signal that the run is asked to stop by, and ignore SIGHUP as `nohup` does."""
    handle = Stop._handle

    def telling(self: Stop, number: int, frame: Any) -> None:
        handle(self, number, frame)
        tell(f"asked: {self.reason}")

    Stop._handle = telling  # type: ignore[method-assign]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def spoil(where: str) -> None:
    if where == "start":
        train.make_plan = raises(InputError("corpus.bin: no such file"))
    elif where == "hangs":
        before_the_third_step(rank_1_hangs_here)
    elif where == "save":
        writing.plan_files = raises(OSError(errno.ENOSPC, "No space left on device", "rank_1_0.safetensors"))
    else:
        fault = raises(OUT_OF_MEMORY) if where == "memory" else lambda *_: os._exit(9)
        trainer.compute_gradients = step.compute_gradients = fault


def main(argv: list[str]) -> int:
    *argv, where = argv
    if where == "nohup":
        tell_signals()
        before_the_third_step(rank_1_hangs_here)
    elif read_launch().rank == 1:
        spoil(where)
    if argv[0] == "trial":
        _, config, output = argv
        run_trial(load_settings(Path(config)), "tiny", 3, Path(output))
        return 0
    return train.main(argv)
