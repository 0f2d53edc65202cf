"""Starts and ends the process group of a job, and decides which rank reports a failure.

    with joined(launch, folder, cluster, check) as (world, checked):
        ...  # collective calls work in here; an error of one rank ends them all

`training.launch.rendezvous` connects the ranks, `training.launch.failure_monitor` reports failures.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import USER_ERROR, JobError, LostRankError, ToolkitError, TrainingError
from common.settings import ClusterSettings
from training.launch.device import choose_device, claim_gpu, set_threads
from training.launch.failure_monitor import Failure, FailureMonitor
from training.launch.rank import SINGLE, Launch, starting
from training.launch.rendezvous import rendezvous, set_interface, start_monitor
from training.launch.signals import ignore_signals

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_PRINTING = 1.0  # seconds the failed rank gets to print its error: srun kills all tasks when the first one exits

Checked = TypeVar("Checked")


@dataclass(frozen=True)
class World:
    """The ranks of a running job, seen from one of them."""

    rank: int
    size: int
    device: "torch.device"
    launch: Launch = SINGLE


@contextmanager
def joined(
    launch: Launch, folder: Path, cluster: ClusterSettings, check: Callable[[], Checked]
) -> Iterator[tuple[World, Checked]]:
    """Join the job's other ranks through `folder`, call `check`, and start the process group.

    `check` runs before torch is imported, so its errors come early. `cluster` decides the number of
    threads, the network interface, and whether there must be GPUs.

    The rank that fails first prints its error with its number. The others exit within seconds with
    the same exit code, and name that rank. Raises JobError if not all ranks join within
    START_TIMEOUT seconds, and LostRankError if another rank died.
    """
    if launch.world_size == 1:
        try:
            checked = check()
            folder.mkdir(parents=True, exist_ok=True)
            starting(launch.rank, "imports PyTorch")
            yield World(0, 1, _device(launch, cluster), launch), checked
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError(describe(error)) from None
        return
    folder.mkdir(parents=True, exist_ok=True)
    store = rendezvous(launch, folder, cluster.interface)
    with start_monitor(launch, store, cluster.interface) as monitor:
        try:
            checked = check()
            yield _start_process_group(launch, cluster, store, monitor), checked
        except Exception as error:
            final = _error_to_raise(launch, monitor, error)
            if final is error:
                raise
            raise final from None
        except BaseException as error:  # an interrupt
            monitor.fail(Failure(launch.rank, describe(error)))
            raise
        finally:
            import torch.distributed as dist

            failed = sys.exc_info()[0] is not None
            # after a failure NCCL would wait for the others
            if dist.is_initialized() and not (failed and "nccl" in dist.get_backend_config()):
                dist.destroy_process_group()


def _device(launch: Launch, cluster: ClusterSettings) -> "torch.device":
    set_threads(launch, cluster.cpus_per_task)  # before torch is imported
    starting(launch.rank, "opens the device")
    return choose_device(launch, cluster.gpus_per_node)


def _start_process_group(launch: Launch, cluster: ClusterSettings, store: "Store", monitor: FailureMonitor) -> World:
    """Choose this rank's device, and start the process group."""
    device = _device(launch, cluster)
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    on_gpu = device.type == "cuda"
    if on_gpu:
        claim_gpu(launch, device, store)
    set_interface(launch, cluster.interface, store, monitor)
    starting(launch.rank, f"connects the {launch.world_size} processes")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=30),  # the longest a rank may wait for another: a checkpoint on a slow disk
        device_id=device if on_gpu else None,
    )
    return World(launch.rank, launch.world_size, device, launch)


@contextmanager
def started(launch: Launch, folder: Path, cluster: ClusterSettings | None = None) -> Iterator[World]:
    """`joined` with nothing to check."""
    with joined(launch, folder, cluster or ClusterSettings(), lambda: None) as (world, _):
        yield world


# ------------------------------------------------------------------------------- who failed


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


def _error_to_raise(launch: Launch, monitor: FailureMonitor, error: Exception) -> BaseException:
    """The exception that this rank ends with, once the hub has named the first failure."""
    import torch.distributed as dist

    ignore_signals()
    decided = None
    # NCCL's errors have their own class; gloo's are recognised by the source file that they name
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):
        error = LostRankError("lost contact with another process of the job; rerun to resume")
        decided = monitor.wait()
    code = error.exit_code if isinstance(error, ToolkitError) else USER_ERROR
    own = Failure(launch.rank, describe(error), code)
    decided = decided or monitor.fail(own)
    if not isinstance(error, ToolkitError | OSError) and not _out_of_memory(error):
        error.add_note(f"(on rank {launch.rank} of {launch.world_size})")
        return error  # a defect of ours, whose traceback is worth printing
    if decided.rank == launch.rank:
        message = f"rank {launch.rank}: {own.message}"
    else:
        message = decided.seen_by(launch.rank)
        time.sleep(_PRINTING)
        if decided.message == own.message and launch.rank != 0:
            return SystemExit(decided.code)  # rank 0 has printed it
    final = JobError(message)
    final.exit_code = (own if decided.rank == launch.rank else decided).code
    return final
