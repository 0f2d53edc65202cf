"""A training job whose rank 1 stops half-way, inside a function of an unmistakable name."""

import time
from collections.abc import Generator
from typing import Any

from training import loop, train
from training.distributed import read_launch


def rank_1_hangs_here() -> None:
    time.sleep(600)


def main(argv: list[str]) -> int:
    real = loop.step_batches

    def stalling(session: Any, consumed: int) -> Generator[Any, None, None]:
        for number, batches in enumerate(real(session, consumed)):
            if number == 2 and read_launch().rank == 1:
                rank_1_hangs_here()
            yield batches

    loop.step_batches = stalling  # type: ignore[assignment]
    return train.main(argv)
