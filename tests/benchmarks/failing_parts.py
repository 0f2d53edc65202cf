"""Items that fail in every way, for a worker of benchmarks.gpu."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

from benchmarks.gpu.items import Context, Item, LeftOutError, Row


def run(item: Item, _context: Context) -> Iterator[Row]:
    """A row, then what the item's name says."""
    yield {"process": os.getpid()}
    if item.name == "raises":
        raise ValueError("a bad number")
    if item.name == "leaves out":
        raise LeftOutError("no such key")
    if item.name == "takes too much":
        raise MemoryError("4 GB")
    if item.name == "dies":
        os._exit(3)
    if item.name == "hangs":
        time.sleep(60)


PARTS = {"part": SimpleNamespace(run=run)}
