"""Collects garbage in the same iterations on all ranks.

    with collected_together() as collect:
        collect(iteration)    # before each iteration

Python collects whenever a process has made enough objects: at other times on each rank. A step ends
when the last rank has ended, so that each rank's pause is a pause of all.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 100
"""Iterations between two collections."""


@contextmanager
def collected_together() -> Iterator[Callable[[int], None]]:
    """Yield what collects if the iteration is due; nothing else does inside the block.

    What exists when it is entered (modules, the model) is not looked at again: a collection takes
    that much less.
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
