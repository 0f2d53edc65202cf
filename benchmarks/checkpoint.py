"""Saves and loads of a checkpoint: ours, with hashes and manifest, and a copy of its files.

A checkpoint has the float32 parameters of a model and both moments: 1.5 GB at 124M. The copy,
shutil.copyfile with fsync, shows the disk's limit. Peers write the same tensors: safetensors with
fsync, torch.distributed.checkpoint with its defaults. Reads find the files in the page cache; ours
verifies the XXH3 of each file first. The files of a save are removed before the next one begins: on
some virtual machines, pages that were just freed are faster.

The second table is train.async_save: how long training pauses for a save, as a share of the save's
total time, and how long a step takes meanwhile, which on CPUs shares the cores with the save.
"""

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Row, compare, timed
from benchmarks.step import SIZES, Job, opened, write_dataset
from common.files import fsync

if TYPE_CHECKING:
    from torch import Tensor

    from training.checkpoint.writing import CheckpointWriter
    from training.planning.run import Plan
    from training.session import Session


def _writer(plan: "Plan", session: "Session", folder: Path) -> "CheckpointWriter":
    """The trainer's own writer of checkpoints."""
    from training.checkpoint.writing import CheckpointWriter, SavedRun

    folder.mkdir()
    run = SavedRun(folder, plan.experiment, plan.tokenize, plan.data.train)
    return CheckpointWriter(run, session.parameters, session.optimizer)


def bandwidths(plan: "Plan", session: "Session", folder: Path, rounds: int) -> list[Row]:
    """Rows of saves and loads; each load reads the save before it."""
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from training import checkpoint
    from training.checkpoint import Progress, state_tensors

    saver, iterations, theirs = _writer(plan, session, folder / "run"), count(1), folder / "theirs"
    file = theirs / "tensors"
    library = {"checkpoint_id": theirs / "dcp", "no_dist": True}

    def tensors() -> "dict[str, Tensor]":
        return state_tensors(session.parameters, session.optimizer)

    def fill(read: "dict[str, Tensor]") -> None:
        for name, tensor in tensors().items():
            tensor.copy_(read[name])

    def our_save() -> None:
        saver.save(Progress(next(iterations), 0))

    def our_load() -> None:
        manifest = checkpoint.newest(saver.run.folder)
        assert manifest is not None
        checkpoint.load(manifest, session.parameters, session.optimizer)

    def safetensors_save() -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, file)
        fsync(file)

    def copy() -> None:
        assert saver.newest is not None
        (theirs / "copy").mkdir()
        for path in sorted(saver.newest.iterdir()):
            shutil.copyfile(path, theirs / "copy" / path.name)
            fsync(theirs / "copy" / path.name)

    def clear(label: str) -> None:
        if label.startswith("save"):
            for path in (theirs, *saver.run.folder.glob("iter_*")):
                if path != saver.newest:
                    shutil.rmtree(path, ignore_errors=True)
            theirs.mkdir()
            os.sync()

    actions: dict[str, Callable[[], object]] = {
        "save: copy of the files": copy,
        "save: safetensors": safetensors_save,
        "load: safetensors": lambda: fill(load_file(file)),
        "save: torch.distributed.checkpoint": lambda: state_dict_saver.save(tensors(), **library),
        "load: torch.distributed.checkpoint": lambda: state_dict_loader.load(tensors(), **library),
        "save: ours, with hashes and manifest": our_save,
        "load: ours, verified": our_load,
    }
    our_save()  # the source of the copy; also allocates memory
    gigabytes = sum(tensor.nbytes for tensor in tensors().values()) / 1e9
    return compare("checkpoint", actions, rounds, gigabytes, "GB", here=True, before=clear)


def in_background(plan: "Plan", session: "Session", folder: Path, rounds: int) -> list[Row]:
    """The row of `train.async_save`."""
    from training.checkpoint import Progress
    from training.step import step_batches, train_step

    numbers, rows = count(1), list[dict[str, float]]()
    with (
        _writer(plan, session, folder / "background") as saver,
        closing(step_batches(session, plan.data.train, 0)) as steps,
    ):

        def step() -> float:
            return timed(lambda: train_step(session, next(numbers), next(steps), 1e-4)).wall

        step()
        for number in range(rounds + 1):
            alone, begun = median(step() for _ in range(3)), time.perf_counter()
            saver.save(Progress(number + 1, 0))
            paused, meanwhile = time.perf_counter() - begun, [step()]
            while saver.busy:
                meanwhile.append(step())
            saver.wait()
            saved = time.perf_counter() - begun
            row = {"training pauses, s": paused, "until saved, s": saved, "share %": 100 * paused / saved}
            rows.append({**row, "a step, s": alone, "a step meanwhile, s": median(meanwhile)})
    medians = {name: median(row[name] for row in rows[1:]) for name in rows[0]}  # the first save allocates the buffers
    return [{"save in the background": "train.async_save", **medians}]


def measure(arguments: Namespace) -> Iterator[Row]:
    """Saves and loads, and a plain copy of the files; training during a background save."""
    job = Job(arguments.work, SIZES[arguments.size])
    write_dataset(job)
    yield from tables(job, arguments.work, arguments.rounds)


def tables(job: Job, folder: Path, rounds: int) -> Iterator[Row]:
    """The rows of both tables; the job's dataset must exist."""
    import warnings

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended
    with redirect_stdout(None), opened(job) as (plan, session):  # hides the trainer's log
        rows = bandwidths(plan, session, folder, rounds)
    yield from rows
    with redirect_stdout(None), opened(job._replace(train={**job.train, "async_save": True})) as (plan, session):
        rows = in_background(plan, session, folder, rounds)
    yield from rows
