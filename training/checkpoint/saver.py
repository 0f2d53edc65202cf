"""The checkpoints of a run while it trains: when they are written, and which are kept.

    with Saver(session, folder) as saver:
        saver.save(progress)                # a collective call
    saver.newest                            # the folder of the last one, complete

With `train.async_save` a save copies the tensors into the CPU's memory, and training goes on while a thread writes the
copies. There is one such save at a time: the next one, and the end, wait for it, and raise what went wrong with it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.console import say, warn
from training import checkpoint
from training.checkpoint import Progress
from training.session import Session


class Saver:
    """Writes the checkpoints of one run.

    `may_write` raises TrainingError on rank 0 when the run's folder is not ours any more. It is called there before a
    save, before the finished checkpoint gets its name, and before an old one is removed. `mark` is that of
    `checkpoint.write`.
    """

    def __init__(
        self, session: Session, folder: Path, may_write: Callable[[], None] = lambda: None, mark: str = ""
    ) -> None:
        self.session, self.folder, self.may_write, self.mark = session, folder, may_write, mark
        self.newest: Path | None = None
        self._sound: set[Path] = set()  # checkpoints that need not be read through again
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[Path] | None = None
        if session.plan.experiment.train.async_save:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
            if dist.is_initialized():  # of the thread's own: two threads' calls would mix in one group
                self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as problem:
            if error is None:
                raise
            if self.session.world.rank == 0 and str(problem) != str(error):
                warn(f"{problem}")  # the other error is what ends the run
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or begin to (a collective call).

        Raises CheckpointError on all ranks when it, or the one before it, cannot be written.
        """
        self.wait()
        session, plan = self.session, self.session.plan
        replicas = checkpoint.compare_replicas(session.parameters)
        if replicas.drifted and session.world.rank == 0:
            say(f"warning: iteration {progress.iteration}: {replicas.warning()}")
        tensors = checkpoint.state_tensors(session.parameters, session.optimizer, plan.experiment.model.vocab_size)
        write = partial(self._write, tensors, progress, replicas)
        if self._thread is None:
            self.newest = write()
        else:
            checkpoint.copy_to_cpu(tensors, self._copies)
            self._writing = self._thread.submit(write, copies=self._copies)

    @property
    def busy(self) -> bool:
        """Whether a save is being written while training goes on."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one; raises what went wrong with it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self.newest = writing.result()

    def _write(self, tensors: dict[str, Tensor], progress: Progress, replicas: Any, **options: Any) -> Path:
        """All that need not be done between two steps."""
        plan, train = self.session.plan, self.session.plan.experiment.train
        options |= {"group": self._group, "may_write": self.may_write, "mark": self.mark}
        path = checkpoint.write(
            self.folder,
            tensors,
            progress,
            experiment=plan.experiment,
            tokenize=plan.tokenize,
            data=plan.train,
            replicas=replicas,
            **options,
        )
        if self.session.world.rank == 0:
            say(f"saved {path}")
        self._sound.add(path)
        checkpoint.prune(self.folder, train.keep_last, train.keep_every, self._sound, self._group, self.may_write)
        return path
