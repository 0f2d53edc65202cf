"""Writes checkpoints, complete or not at all, and removes old ones.

    with CheckpointWriter(run, parameters, optimizer) as writer:
        writer.save(progress)               # a collective call
    writer.newest                           # the folder of the last checkpoint, complete

A checkpoint is written under a `.tmp` name and renamed after its manifest is on disk: between two
steps, or with `train.async_save` in the background. Then a save copies the tensors to CPU memory,
and a thread writes the copies while training continues. The next save and the end wait for it, and
raise its error.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.console import say, warn
from common.errors import CheckpointError, ToolkitError, TrainingError
from common.files import write_text
from common.files.writing import swap_folder
from common.settings import Experiment, TokenizeSettings
from training.checkpoint.lookup import discard, find_damage, remove
from training.checkpoint.manifest import Manifest, Progress, copy_vocabulary, write_manifest
from training.checkpoint.parts import held_shards, plan_files, state_tensors, write_files, write_index
from training.checkpoint.replicas import Replicas, compare_replicas
from training.dataset.blend import Blend
from training.model_folder import checkpoint_folder, checkpoint_folders, iteration_of
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.sizes import padded_vocab_size
from training.region import Region


@dataclass(frozen=True)
class SavedRun:
    """Where the checkpoints of a run go, and what each manifest says of the run."""

    folder: Path
    """The model folder."""
    experiment: Experiment
    tokenize: TokenizeSettings
    data: Blend
    """The training data."""
    may_write: Callable[[], None] = lambda: None
    """Raises TrainingError on rank 0 if another job has the folder. Called before a save, before
    the rename of the finished checkpoint, and before the removal of an old one."""
    mark: str = ""
    """Part of an unfinished checkpoint's name, equal on all ranks: two jobs never write to the same
    folder, even if one has lost its lock without noticing."""


class CheckpointWriter:
    """Saves the parameters and the optimiser state of one run."""

    def __init__(self, run: SavedRun, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.run, self._parameters, self._optimizer = run, parameters, optimizer
        self._train = run.experiment.train
        self._on_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        self.newest: Path | None = None
        self._verified: set[Path] = set()  # checkpoints that need not be read again
        self._thread: ThreadPoolExecutor | None = None
        self._copies: dict[str, Tensor] = {}
        self._pending: Future[Path] | None = None
        self._group: Any = None
        if self._train.async_save:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
            if dist.is_initialized():  # the thread's own group: collective calls of two threads would mix in one
                self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()  # waits for the save
        if kind is None:
            self.wait()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or start to (a collective call).

        Raises CheckpointError on all ranks if this save or the previous one failed.
        """
        self.wait()
        replicas = compare_replicas(self._parameters)
        if replicas.drifted and self._on_rank0:
            warn(f"iteration {progress.iteration}: {replicas.warning()}")
        tensors = state_tensors(self._parameters, self._optimizer)
        shards, values = held_shards(tensors, self.run.experiment.model.vocab_size)
        if self._thread is None:
            self.newest = self._write(shards, values, progress, replicas)
        else:
            _copy_to_cpu(values, self._copies)
            self._pending = self._thread.submit(self._write, shards, self._copies, progress, replicas)

    @property
    def busy(self) -> bool:
        """Whether a save is running in the background."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one; raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.newest = pending.result()

    def _write(
        self, shards: dict[str, Region], values: dict[str, Tensor], progress: Progress, replicas: Replicas
    ) -> Path:
        """The part of a save that can run in the background."""
        path = write(self.run, shards, values, progress, replicas, self._group)
        if self._on_rank0:
            say(f"saved {path}")
        self._verified.add(path)
        self._prune(progress.best.get("iteration") if self._train.keep_best else None)
        return path

    def _prune(self, best: int | None) -> None:
        """Keep the newest `keep_last` undamaged checkpoints; 0 keeps all (a collective call).

        Multiples of `keep_every` iterations and iteration `best` stay. Nothing more is removed once
        another job has the folder.
        """
        keep_last, keep_every, kept = self._train.keep_last, self._train.keep_every, 0
        for folder in all_gather(checkpoint_folders(self.run.folder), self._group)[0] if keep_last else ():
            iteration = iteration_of(folder)
            if kept < keep_last:
                if not find_damage(folder, self._group, content=folder not in self._verified):
                    kept += 1
                    self._verified.add(folder)
            elif iteration != best and not (keep_every and iteration % keep_every == 0):
                self._verified.discard(folder)
                with suppress(TrainingError):
                    if self._on_rank0:
                        self.run.may_write()
                        remove(folder)


def _copy_to_cpu(values: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Copy tensors into CPU `buffers`, which are allocated on the first call."""
    for key, value in values.items():
        if key not in buffers:
            buffers[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        buffers[key].copy_(value, non_blocking=True)
    if any(value.is_cuda for value in values.values()):
        torch.cuda.synchronize()


def write(
    run: SavedRun,
    shards: Mapping[str, Region],
    values: Mapping[str, Tensor],
    progress: Progress,
    replicas: Replicas,
    group: Any = None,
) -> Path:
    """Write what the ranks hold of each tensor as a checkpoint (a collective call over `group`).

    Returns its folder, which replaces an older checkpoint of the same iteration. `values` are
    read one by one. Raises CheckpointError on all ranks if a file cannot be written, and what
    `run.may_write` raises; then the unfinished checkpoint is removed, and older ones stay.
    """
    final = checkpoint_folder(run.folder, progress.iteration)
    unfinished = final.with_name(".".join(filter(None, (final.name, run.mark, "tmp"))))
    rank = dist.get_rank() if dist.is_initialized() else 0
    files = plan_files(shards, group)

    def on_rank0(action: Callable[[], None]) -> None:  # an error is raised on all ranks
        run_on_all_ranks(action if rank == 0 else lambda: None, group)

    def publish() -> None:
        run.may_write()
        entries = {**write_index(unfinished, files), **dict(sorted(written.items()))}
        write_manifest(unfinished, _manifest(run, final, progress, replicas, entries))
        _rename(run, unfinished, final, progress)

    try:
        on_rank0(lambda: _prepare(run, unfinished))
        mine = run_on_all_ranks(lambda: write_files(unfinished, files[rank], values), group)
        written = {name: entry for of_rank in all_gather(mine, group) for name, entry in of_rank.items()}
        on_rank0(publish)
    except (OSError, ToolkitError) as error:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, ToolkitError):
            raise
        on_rank0(run.may_write)  # another job may have removed the files
        last = all_gather([folder.name for folder in checkpoint_folders(run.folder)[:1]] or ["none"], group)[0][0]
        raise CheckpointError(
            f"{final}: not saved: {error.strerror or error} ({error.filename or unfinished}); "
            f"the last complete checkpoint is {last}"
        ) from None
    return final


def _prepare(run: SavedRun, unfinished: Path) -> None:
    """Make the unfinished checkpoint's folder, and remove those of killed saves and removals."""
    run.may_write()
    for leftover in run.folder.glob("iter_*.tmp"):
        discard(leftover)
    unfinished.mkdir()


def _manifest(run: SavedRun, final: Path, progress: Progress, replicas: Replicas, files: dict[str, Any]) -> Manifest:
    """The manifest of a checkpoint with these files."""
    experiment = run.experiment
    return Manifest(
        path=final,
        **asdict(progress),
        padded_vocab_size=padded_vocab_size(experiment.model.vocab_size, experiment.parallel.tensor),
        model=experiment.model,
        parallel=experiment.parallel,
        train=experiment.train,
        tokenize=copy_vocabulary(run.folder, run.tokenize),
        data=run.data.identity,
        content=run.data.content,
        end_of_text=run.data.end_of_text,
        replicas=replicas,
        torch=torch.__version__,
        files=files,
    )


def _rename(run: SavedRun, unfinished: Path, final: Path, progress: Progress) -> None:
    """Give the finished checkpoint its name, and point `latest` and `best` to it."""
    replaced = final.with_name(final.name + ".old.tmp")
    swap_folder(unfinished, final, replaced)
    discard(replaced)
    write_text(run.folder / "latest", final.name + "\n")
    best = checkpoint_folder(run.folder, progress.best.get("iteration", 0))
    if run.experiment.train.keep_best and best.is_dir():
        write_text(run.folder / "best", best.name + "\n")
