"""Collects garbage in the same iterations on all ranks.

    with collected_together() as collect:
        collect(iteration)    # before each iteration

Python collects whenever a process has made enough objects: at other times on each rank. A step ends
with its last rank, so each rank's pause is a pause of all.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 100  # iterations between two collections


@contextmanager
def collected_together() -> Iterator[Callable[[int], None]]:
    """Yield a function that collects if the iteration is due; nothing else collects inside.

    Objects that exist before (modules, the model) are never looked at again: that saves their time.
    """
    automatic = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(iteration: int) -> None:
        if iteration % EVERY == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()
