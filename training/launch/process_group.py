"""Starts and ends the process group of a job, and decides which rank reports a failure.

    with monitored(launch, folder) as job:      # all ranks have met; an error of one ends them all
        ...                                     # checks that need no device
        with process_group(job) as world: ...   # collective calls work in here
    with started(launch, folder) as world: ...  # both

How they meet: `training.launch.rendezvous`. How they learn of a failure: `training.launch.failure_monitor`.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import USER_ERROR, JobError, LostRankError, ToolkitError, TrainingError
from common.settings import ClusterSettings
from training.launch.device import choose_device, claim_gpu, set_threads
from training.launch.failure_monitor import Failure, FailureMonitor
from training.launch.rank import Launch
from training.launch.rendezvous import rendezvous, set_interface, start_monitor
from training.launch.signals import ignore_signals

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_PRINTING = 1.0  # seconds the failed rank gets to print its error: srun kills all tasks when the first one exits


@dataclass(frozen=True)
class Job:
    """The ranks that have met, seen from one of them."""

    launch: Launch
    store: "Store | None" = None
    """Shared by all ranks; None if there is only one."""
    monitor: FailureMonitor | None = None


@dataclass(frozen=True)
class World:
    """The ranks of a running job, seen from one of them."""

    rank: int
    size: int
    device: "torch.device"
    job: str = "single"
    """`Launch.key`."""
    store: "Store | None" = None
    """Shared by all ranks; None if there is only one."""


@contextmanager
def monitored(launch: Launch, folder: Path, interface: str = "") -> Iterator[Job]:
    """Meet the job's other ranks in `folder`, and end with them if one fails.

    An error inside is printed once: by rank 0 if all ranks raise the same one, otherwise by the lowest rank that raises
    it, with its rank. The others exit within seconds and name that rank, with the same exit code. Raises JobError if
    the ranks do not all arrive within START_TIMEOUT seconds, and LostRankError if another rank died.
    """
    if launch.world_size == 1:
        try:
            yield Job(launch)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError(describe(error)) from None
        return
    folder.mkdir(parents=True, exist_ok=True)
    store = rendezvous(launch, folder, interface)
    with start_monitor(launch, store, interface) as monitor:
        try:
            yield Job(launch, store, monitor)
        except Exception as error:
            final = _error_to_raise(launch, monitor, error)
            if final is error:
                raise
            raise final from None
        except BaseException as error:  # an interrupt
            monitor.report(Failure(describe(error)))
            raise
        finally:
            _end_process_group(failed=sys.exc_info()[0] is not None)


@contextmanager
def process_group(job: Job, cluster: ClusterSettings) -> Iterator[World]:
    """Choose this rank's device and start the process group, which `monitored` ends.

    `cluster` decides the number of threads and the network interface, and whether there must be GPUs.
    """
    launch = job.launch
    set_threads(launch, cluster.cpus_per_task)  # before torch is imported
    import torch.distributed as dist

    device = choose_device(launch, cluster.gpus_per_node)
    if job.store is None or job.monitor is None:
        yield World(0, 1, device, launch.key)
        return
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    on_gpu = device.type == "cuda"
    if on_gpu:
        claim_gpu(launch, device, job.store)
    set_interface(launch, cluster.interface, job.store, job.monitor)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", job.store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=30),  # the longest a rank may wait for another: a checkpoint on a slow disk
        device_id=device if on_gpu else None,
    )
    yield World(launch.rank, launch.world_size, device, launch.key, job.store)


def _end_process_group(failed: bool) -> None:
    import torch.distributed as dist

    if dist.is_initialized() and not (failed and "nccl" in dist.get_backend_config()):  # NCCL would wait for the others
        dist.destroy_process_group()


@contextmanager
def started(launch: Launch, folder: Path, cluster: ClusterSettings | None = None) -> Iterator[World]:
    """`monitored` and `process_group`, with nothing to check in between."""
    cluster = cluster or ClusterSettings()
    with monitored(launch, folder, cluster.interface) as job, process_group(job, cluster) as world:
        yield world


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


def _job_error(message: str, code: int) -> JobError:
    error = JobError(message)
    error.exit_code = code
    return error


def _error_to_raise(launch: Launch, monitor: FailureMonitor, error: Exception) -> BaseException:
    """The exception this rank should end with, once the hub has decided which failure ends the job."""
    import torch.distributed as dist

    ignore_signals()
    decided = None
    # NCCL's errors have their own class; gloo's can only be recognised by the source file they name.
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):
        error = LostRankError("lost contact with another process of the job; started again, the job continues")
        decided = monitor.wait()
    own = Failure(describe(error), error.exit_code if isinstance(error, ToolkitError) else USER_ERROR)
    decided = decided or monitor.fail(own)
    if not isinstance(error, ToolkitError | OSError) and not _out_of_memory(error):
        error.add_note(f"(on rank {launch.rank} of {launch.world_size})")
        return error  # a defect of ours, whose traceback is worth printing
    if launch.rank == decided.ranks[0]:
        others = len(decided.ranks) - 1
        more = f" and {others} more" if others else ""
        everywhere = others == launch.world_size - 1
        return _job_error(own.message if everywhere else f"rank {launch.rank}{more}: {own.message}", own.code)
    time.sleep(_PRINTING)
    if launch.rank in decided.ranks:
        return SystemExit(decided.code)  # another rank prints the error
    return _job_error(decided.seen_by(launch.rank), decided.code)
