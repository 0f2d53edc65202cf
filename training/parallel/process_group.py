"""Starts and ends the process group of a job, and decides which rank reports a failure.

    with before_start(launch, folder): ...      # checks that each process makes before the processes meet
    with started(launch, folder) as world: ...  # all processes have met; collective calls work in here

Where processes meet: `training.parallel.rendezvous`. How they learn of a failure: `training.parallel.lifeline`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import fail, note
from common.errors import JobError, LostRankError, TakenOverError, ToolkitError, TrainingError
from common.settings import ClusterSettings
from training.leaving import RESUME_ME, TAKEN_OVER, TO_CURE, disarm
from training.parallel.device import choose_device, claim_gpu, set_threads
from training.parallel.launch import Launch
from training.parallel.lifeline import Failure, Lifeline
from training.parallel.network import set_interface
from training.parallel.rendezvous import join_lifeline, meet, own_address

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_PRINTING = 1.0  # seconds the failed rank gets to print its error: srun kills all tasks when the first one exits
_SHORT = 60.0  # seconds a failed process waits for the others


@dataclass(frozen=True)
class World:
    """The processes of a running job, seen from one of them."""

    rank: int
    size: int
    device: "torch.device"
    job: str = "single"
    """`Launch.key`."""
    store: "Store | None" = None
    """Shared by all processes; None if there is only one."""


class QuietExit(SystemExit):
    """The end of a rank whose error another rank prints."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.message = failure.message


@contextmanager
def before_start(launch: Launch, folder: Path | None = None) -> Iterator[None]:
    """Wraps the checks that each process makes before they meet: a process that fails still tells the others.

    `folder` is the meeting place for `started`; None if it is not known yet.
    """
    try:
        yield
    except Exception as error:
        if launch.world_size == 1:
            raise
        try:
            with _meeting_folder(launch, folder) as meeting_folder:
                store = meet(launch, meeting_folder, timeout=_SHORT)  # rank 0's serves the others as long as it lives
                lifeline = join_lifeline(launch, store)
        except JobError:  # no other process came
            raise _with_rank(launch, error) from None
        with lifeline:
            raise _error_to_raise(launch, lifeline, error) from None


@contextmanager
def _meeting_folder(launch: Launch, folder: Path | None) -> Iterator[Path]:
    """A folder where failed processes can meet; rank 0 removes the folders that it had to create."""
    if folder is None:
        folder = Path(tempfile.gettempdir()) / f"training-{os.getuid()}"
    made = [path for path in (folder, *folder.parents) if not path.exists()] if launch.rank == 0 else []
    if made:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def started(launch: Launch, folder: Path, cluster: ClusterSettings | None = None) -> Iterator[World]:
    """Join the job's other processes; at the end, destroy the process group.

    `cluster` decides the number of threads and the network interface, and whether there must be GPUs.

    An error inside is printed once: by rank 0 if all processes raise the same one, otherwise by the lowest rank that
    raises it, with its rank. The others exit within seconds and name that rank. Raises JobError if the processes do not
    all arrive within START_TIMEOUT seconds, and LostRankError if another process died.
    """
    cluster = cluster or ClusterSettings()
    set_threads(launch, cluster.cpus_per_task)  # before torch is imported
    import torch.distributed as dist

    if launch.world_size == 1:
        device = choose_device(launch, cluster.gpus_per_node)
        try:
            yield World(0, 1, device, launch.key)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError(describe(error)) from None
        return
    store = meet(launch, folder, cluster.interface)
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    with join_lifeline(launch, store, cluster.interface) as lifeline:
        on_gpu = False
        try:
            device = choose_device(launch, cluster.gpus_per_node)
            on_gpu = device.type == "cuda"
            if on_gpu:
                claim_gpu(launch, device, store)
            set_interface(launch, cluster.interface, own_address(launch, store, lifeline))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(minutes=30),  # the longest a rank may wait for another: a checkpoint on a slow disk
                device_id=device if on_gpu else None,
            )
            yield World(launch.rank, launch.world_size, device, launch.key, store)
        except BaseException as error:
            final = _error_to_raise(launch, lifeline, error)
            if final is error:
                raise
            raise final from None
        finally:
            failed = sys.exc_info()[0] is not None
            if dist.is_initialized() and not (on_gpu and failed):  # NCCL would wait for calls that never end
                dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ who failed


def describe(error: BaseException) -> str:
    """An error in one line."""
    if _out_of_memory(error):
        first_line = (str(error).splitlines() or [""])[0]
        return f"out of memory ({first_line}); lower train.micro_batch_size, or spread the model over more processes"
    if isinstance(error, ToolkitError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _out_of_memory(error: BaseException) -> bool:
    """Whether the device or the system ran out of memory; torch reports it in several ways."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in message or "not enough memory" in message)
    )


def _is_defect(error: BaseException) -> bool:
    """Whether an error is a bug of ours, whose traceback is worth printing."""
    return not isinstance(error, ToolkitError | OSError) and not _out_of_memory(error)


_CODES = {LostRankError: RESUME_ME, TakenOverError: TAKEN_OVER}  # all other errors: TO_CURE


def _failure(error: BaseException) -> Failure:
    """What the other ranks need to know of an error."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), TO_CURE)
    return Failure(describe(error), code)


def _error_of(code: int, message: str) -> ToolkitError:
    """The error of a rank that ends with an exit code."""
    return next((kind for kind, other in _CODES.items() if other == code), JobError)(message)


def _with_rank(launch: Launch, error: BaseException, others: int = 0) -> BaseException:
    """The error of a rank that does not share it with all others, with the rank in its message."""
    if _is_defect(error):
        error.add_note(f"(on rank {launch.rank} of {launch.world_size})")
        return error
    more = f" and {others} more" if others else ""
    return _error_of(_failure(error).code, f"rank {launch.rank}{more}: {describe(error)}")


def _error_to_raise(launch: Launch, lifeline: Lifeline, error: BaseException) -> BaseException:
    """The exception this process should end with, once it knows which other ranks failed and why."""
    import torch.distributed as dist

    disarm()
    # NCCL's errors have their own class; gloo's can only be recognised by the source file they name.
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):
        if lifeline.wait_for_failure():
            time.sleep(_PRINTING)
            return _error_of(lifeline.exit_code(), lifeline.describe_failure())
        error = LostRankError("lost contact with another process of the job; started again, the job continues")
    failure = _failure(error)
    if not isinstance(error, Exception):  # an interrupt
        lifeline.fail(failure, wait=False)
        return error
    same_error = sorted(rank for rank, other in lifeline.fail(failure).items() if other == failure)
    if _is_defect(error):
        return _with_rank(launch, error)
    if launch.rank != same_error[0]:
        time.sleep(_PRINTING)
        return QuietExit(failure)
    if len(same_error) < launch.world_size:
        return _with_rank(launch, error, len(same_error) - 1)
    return TrainingError(failure.message) if _out_of_memory(error) else error


def exit_code(error: ToolkitError) -> int:
    """Print an error that `started` raised, in one line, and return the exit code for it."""
    code = _failure(error).code
    if code == TAKEN_OVER:
        note(str(error))
        return code
    fail(error)
    return code
