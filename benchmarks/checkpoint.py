"""A checkpoint on its way to the disk and back: ours, with hashes and manifest, against a copy of its files.

A checkpoint has the float32 parameters of a model and both moments: 1.5 GB at 124M. The copy shows the disk's limit:
shutil.copyfile of the same files, and fsync. The peers write the same tensors, and fsync: torch.save, safetensors, and
torch.distributed.checkpoint with its defaults. Reads find the files in the page cache, like the copy its source; ours
verifies the XXH3 of every file first. Hashing alone, of the same bytes in memory by all threads of ours, is a row:
a save that hashes cannot be faster. Rows take turns, forwards and backwards, and a ratio is the median over the rounds,
each against the copy of the same round, because the speed of disks changes from minute to minute. Each save begins
when the files of the one before are removed: on a virtual machine whose host takes free memory back, pages freed a
moment ago are faster than others, and a row that alone finds them wins.

The second table is train.async_save: how long training pauses for a save, as a share of the save's total time, and how
long a step takes meanwhile, which on CPUs shares the cores with the save.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import xxhash

from benchmarks.machine import table
from benchmarks.training_job import SIZES, Job, write_dataset
from common.cli import output_folder, positive_int
from common.files import fsync

if TYPE_CHECKING:
    from torch import Tensor

    from training.checkpoint.async_save import CheckpointWriter
    from training.run_plan import Plan
    from training.step import Session

_COPY = "save: copy of the files"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, default="124m", help="size of the model (default 124m)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="rounds per row (default 3)")
    parser.add_argument(
        "--folder", type=output_folder, metavar="DIR", help="where to write (default: a temporary folder)"
    )


def seconds(action: Callable[[], object]) -> float:
    """Duration of an action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _writer(plan: "Plan", session: "Session", folder: Path) -> "CheckpointWriter":
    """The trainer's own writer of checkpoints."""
    from training.checkpoint.async_save import CheckpointWriter

    return CheckpointWriter(
        folder, session.parameters, session.optimizer, plan.experiment, plan.tokenize, plan.data.train
    )


class Rows:
    """The actions of a round: each save, then the load of the files that it wrote."""

    def __init__(self, plan: "Plan", session: "Session", folder: Path) -> None:
        self.session, self.folder = session, folder
        self.saver = _writer(plan, session, folder / "run")
        self.saver.folder.mkdir()
        self.iterations = count(1)

    def tensors(self) -> "dict[str, Tensor]":
        """What is saved, by name."""
        from training.checkpoint import state_tensors

        return state_tensors(self.session.parameters, self.session.optimizer)

    def actions(self) -> list[dict[str, Callable[[], None]]]:
        """A save by label, and the load of what it wrote; ratios refer to the first one."""
        return [
            {_COPY: self.copy},
            {"save: XXH3 alone": self.hash},
            {"save: torch.save": self.torch_save, "load: torch.load": self.torch_load},
            {"save: safetensors": self.safetensors_save, "load: safetensors": self.safetensors_load},
            {"save: torch.distributed.checkpoint": self.dcp_save, "load: torch.distributed.checkpoint": self.dcp_load},
            {"save: ours, with hashes and manifest": self.our_save, "load: ours, verified": self.our_load},
        ]

    def clear(self) -> None:
        """Remove all files except the newest checkpoint, so that every save begins with the same free memory."""
        for path in (*self.folder.glob("run/iter_*"), *(self.folder / name for name in ("copy", "dcp"))):
            if path != self.saver.newest and path.exists():
                shutil.rmtree(path)
        for name in ("torch.pt", "model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        os.sync()

    def copy(self) -> None:
        """Copy the files of the newest checkpoint, one after the other."""
        target = self.folder / "copy"
        target.mkdir()
        assert self.saver.newest is not None
        for path in sorted(self.saver.newest.iterdir()):
            shutil.copyfile(path, target / path.name)
            fsync(target / path.name)

    def hash(self) -> None:
        """As many bytes as a checkpoint has, in memory."""
        from training.checkpoint.storage import THREADS

        block, size = bytes(1 << 20), sum(tensor.nbytes for tensor in self.tensors().values())

        def share(_thread: int) -> None:
            digest = xxhash.xxh3_128()
            for _ in range(0, size // THREADS, len(block)):
                digest.update(block)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(share, range(THREADS)))

    def torch_save(self) -> None:
        """One file."""
        import torch

        path = self.folder / "torch.pt"
        torch.save(self.tensors(), path)
        fsync(path)

    def safetensors_save(self) -> None:
        """One file."""
        from safetensors.torch import save_file

        path = self.folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in self.tensors().items()}, path)
        fsync(path)

    def dcp_save(self) -> None:
        """Save with the library's own writer."""
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(self.tensors(), checkpoint_id=self.folder / "dcp", no_dist=True)

    def our_save(self) -> None:
        """Save as the trainer does."""
        from training.checkpoint import Progress

        self.saver.save(Progress(next(self.iterations), 0))

    def torch_load(self) -> None:
        """Load the whole file, then copy it into the model."""
        import torch

        self.fill(torch.load(self.folder / "torch.pt", weights_only=True))

    def safetensors_load(self) -> None:
        """The same."""
        from safetensors.torch import load_file

        self.fill(load_file(self.folder / "model.safetensors"))

    def fill(self, read: "dict[str, Tensor]") -> None:
        """Copy loaded tensors into the model and the optimiser."""
        for name, tensor in self.tensors().items():
            tensor.copy_(read[name])

    def dcp_load(self) -> None:
        """Load into the model, tensor by tensor."""
        from torch.distributed.checkpoint import state_dict_loader

        state_dict_loader.load(dict(self.tensors()), checkpoint_id=self.folder / "dcp", no_dist=True)

    def our_load(self) -> None:
        """Load as a resuming trainer does."""
        from training import checkpoint

        manifest = checkpoint.newest(self.saver.folder)
        assert manifest is not None
        checkpoint.load(manifest, self.session.parameters, self.session.optimizer)


def bandwidths(rows: Rows, rounds: int) -> list[dict[str, str]]:
    """Rows of both directions."""
    rows.our_save()  # the source of the copy; it also makes the kernel allocate the memory
    size = sum(tensor.nbytes for tensor in rows.tensors().values())
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        for actions in rows.actions()[:: -1 if number % 2 else 1]:
            rows.clear()
            for label, action in actions.items():
                taken.setdefault(label, []).append(seconds(action))
    return [
        {
            "checkpoint": label,
            "MB": f"{size / 1e6:,.0f}",
            "GB/s": f"{size / 1e9 / median(times):.2f}",
            "ratio": f"{median(copy / own for copy, own in zip(taken[_COPY], times, strict=True)):.2f}",
        }
        for label, times in sorted(taken.items(), key=lambda row: row[0].startswith("load"))
    ]


def in_background(plan: "Plan", session: "Session", folder: Path, rounds: int) -> list[dict[str, str]]:
    """The row of `train.async_save`."""
    from training.checkpoint import Progress
    from training.step import step_batches, train_step

    stalls, saves, alone, meanwhile = [], [], [], []
    with _writer(plan, session, folder) as saver, closing(step_batches(session, plan.data.train, 0)) as steps:
        numbers = count(1)

        def step() -> float:
            return seconds(lambda: train_step(session, next(numbers), next(steps), 1e-4))

        step()
        for number in range(rounds + 1):
            before = median(step() for _ in range(3))
            started = time.perf_counter()
            saver.save(Progress(number + 1, 0))
            stalled = time.perf_counter() - started
            during = list(_while(lambda: saver.busy, step))
            saver.wait()
            if number:  # the first save allocates the buffers
                stalls.append(stalled)
                saves.append(time.perf_counter() - started)
                alone.append(before)
                meanwhile.append(median(during))
    return [
        {
            "save in the background": "train.async_save",
            "training pauses, s": f"{median(stalls):.2f}",
            "until saved, s": f"{median(saves):.2f}",
            "share": f"{median(stall / save for stall, save in zip(stalls, saves, strict=True)):.1%}",
            "a step, s": f"{median(alone):.2f}",
            "a step meanwhile, s": f"{median(meanwhile):.2f}",
        }
    ]


def _while(busy: Callable[[], bool], step: Callable[[], float]) -> Iterator[float]:
    yield step()
    while busy():
        yield step()


def measure(arguments: argparse.Namespace) -> str:
    """Two tables: gigabytes per second of saves and loads, and the effect of a background save on training."""
    import warnings

    from training.parallel.launch import read_launch
    from training.parallel.process_group import started
    from training.run_plan import make_plan
    from training.trainer import open_session

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended
    with (
        TemporaryDirectory(dir=arguments.folder) as name,
        started(read_launch(), Path(name)) as world,
        redirect_stdout(None),  # hides the trainer's log
    ):
        folder = Path(name)
        job = Job(folder, SIZES[arguments.size])
        write_dataset(job)
        plan = make_plan(job.settings, "step")
        session = open_session(plan.experiment, world)
        first = table(bandwidths(Rows(plan, session, folder), arguments.rounds))
        (folder / "background").mkdir()
        train = plan.experiment.train.model_copy(update={"async_save": True})
        plan = replace(plan, experiment=plan.experiment.model_copy(update={"train": train}))
        second = table(in_background(plan, session, folder / "background", arguments.rounds))
    return f"{first}\n\n{second}"
