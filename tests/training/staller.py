"""A training job whose last rank hangs in its third step, inside a function with a recognisable name.

`--nohup`: it ignores SIGHUP from the beginning.
"""

import os
import signal
import time
from collections.abc import Generator
from typing import Any

from training import train, trainer
from training.monitoring.stop import Stop
from training.parallel.launch import read_launch


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # not print: a signal handler must not enter a buffer that is being flushed


def rank_1_hangs_here() -> None:
    tell("stalls")
    while True:
        time.sleep(0.1)  # a signal that arrives just before a sleep is handled after it


def main(argv: list[str]) -> int:
    real, handle = trainer.step_batches, Stop._handle

    def stalling(session: Any, data: Any, consumed: int) -> Generator[Any, None, None]:
        for number, batches in enumerate(real(session, data, consumed)):
            if number == 2 and read_launch().rank == read_launch().world_size - 1:
                rank_1_hangs_here()
            yield batches

    def telling(self: Stop, number: int, frame: Any) -> None:
        handle(self, number, frame)
        tell(f"asked: {self.reason}")

    trainer.step_batches = stalling  # type: ignore[assignment]
    Stop._handle = telling  # type: ignore[method-assign]
    if "--nohup" in argv:
        argv.remove("--nohup")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return train.main(argv)
