"""Writes the checkpoints of a run, between two steps or in the background, and removes old ones.

    with CheckpointWriter(folder, parameters, optimizer, experiment, tokenize, data) as writer:
        writer.save(progress)               # a collective call
    writer.newest                           # the folder of the last checkpoint, complete

With `train.async_save` a save copies the tensors to CPU memory, and a thread writes the copies while training
continues. Only one such save runs at a time: the next save and the end wait for it, and raise its error.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.console import say, warn
from common.settings import Experiment, TokenizeSettings
from training import checkpoint
from training.checkpoint import Progress, Replicas
from training.dataset.blend import Blend


class CheckpointWriter:
    """Saves the parameters and the optimiser state of one run.

    `experiment`, `tokenize` and `data` go into the manifest. `may_write` raises TrainingError on rank 0 if another job
    has claimed the model folder. It is called before a save, before the finished checkpoint gets its name, and before
    an old one is removed. `mark`: see `checkpoint.write`.
    """

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        experiment: Experiment,
        tokenize: TokenizeSettings,
        data: Blend,
        may_write: Callable[[], None] = lambda: None,
        mark: str = "",
    ) -> None:
        self.folder, self._may_write = folder, may_write
        self._parameters, self._optimizer = parameters, optimizer
        self._train = experiment.train
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
        self._write_checkpoint = partial(
            checkpoint.write,
            folder,
            experiment=experiment,
            tokenize=tokenize,
            data=data,
            group=self._group,
            may_write=may_write,
            mark=mark,
        )

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as problem:
            if error is None:
                raise
            if self._on_rank0 and str(problem) != str(error):
                warn(f"{problem}")  # the run ends with the other error
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or start to (a collective call).

        Raises CheckpointError on all ranks if this checkpoint, or the one before it, cannot be written.
        """
        self.wait()
        replicas = checkpoint.compare_replicas(self._parameters)
        if replicas.drifted and self._on_rank0:
            warn(f"iteration {progress.iteration}: {replicas.warning()}")
        tensors = checkpoint.state_tensors(self._parameters, self._optimizer)
        write = partial(self._write, tensors, progress, replicas)
        if self._thread is None:
            self.newest = write()
        else:
            checkpoint.copy_to_cpu(tensors, self._copies)
            self._pending = self._thread.submit(write, self._copies)

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
        self,
        tensors: dict[str, Tensor],
        progress: Progress,
        replicas: Replicas,
        copies: dict[str, Tensor] | None = None,
    ) -> Path:
        """The part of a save that can run in the background."""
        path = self._write_checkpoint(tensors, progress, replicas=replicas, copies=copies)
        if self._on_rank0:
            say(f"saved {path}")
        self._verified.add(path)
        train = self._train
        checkpoint.prune(self.folder, train.keep_last, train.keep_every, self._verified, self._group, self._may_write)
        return path
