"""Checkpoints of 345M from and to the GPU, and what a save in the background costs the steps beside it.

Parameters and both moments, 4.3 GB. A copy of the same files with fsync shows the disk's limit; loads find the files
in the page cache.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoint import Rows, in_background, seconds
from benchmarks.gpu.items import Context, Item, Row
from benchmarks.gpu.steps import Variant, job_of
from benchmarks.step import opened

TITLE = "Checkpoints: GB/s from and to the GPU, and saves in the background"

_VARIANT = Variant("345m", 16, train={"compile": "none"})
_BACKGROUND = Variant("345m", 16, train={"compile": "none", "async_save": True})


def items(_toy: bool) -> list[Item]:
    """One item per table."""
    return [Item("checkpoint", "save and load", 25), Item("checkpoint", "in the background", 15)]


def run(item: Item, context: Context) -> Iterator[Row]:
    """Rows of one table."""
    import warnings

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended
    with (
        TemporaryDirectory(dir=context.folder) as name,
        opened(job_of(_VARIANT if item.name == "save and load" else _BACKGROUND, context)) as (plan, session),
    ):
        if item.name != "save and load":
            yield from in_background(plan, session, Path(name), 2)
            return
        rows = Rows(plan, session, Path(name))
        rows.our_save()  # the source of the copy; it also takes the memory that later saves use
        size = sum(tensor.nbytes for tensor in rows.tensors().values())
        for label, action in {
            "copy of the files": rows.copy,
            "save: torch.save": rows.torch_save,
            "load: torch.load": rows.torch_load,
            "save: ours, with hashes and manifest": rows.our_save,
            "load: ours, verified": rows.our_load,
        }.items():
            if not label.startswith("load"):
                rows.clear()
            taken = seconds(action)
            yield {"checkpoint": label, "GB": size / 1e9, "s": taken, "GB/s": size / 1e9 / taken}
