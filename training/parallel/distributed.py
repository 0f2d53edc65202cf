"""Starting the processes of a job: who am I, where do we meet, on which device.

    with started(settings, folder) as world: ...

Who: submitit's local executor, then Slurm (srun, which submitit's Slurm executor uses too), then torchrun, then one
process alone. A torchrun inside a Slurm job wins over Slurm's variables, which then describe its launcher.
Where: `training.parallel.rendezvous`. When one fails: `training.parallel.lifeline`.
"""

import ctypes
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from common.errors import ConfigError, JobError, ToolkitError, TrainingError
from common.settings import ParallelSettings
from common.workers import available_cpus
from training.parallel.lifeline import Lifeline
from training.parallel.rendezvous import join_lifeline, meet

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
Result = TypeVar("Result")
_SPEAKING = 1.0  # seconds for the rank that has the cause to print it: srun kills all when the first one has left
_SHORT = 30.0  # seconds that a process which has failed already waits for the others


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says about this process."""

    launcher: str
    """submitit, slurm, torchrun or single."""
    rank: int
    size: int
    """Processes in the job."""
    local_rank: int
    local_size: int
    """Processes on this node (the largest number of any node)."""
    nodes: int
    key: str
    """Differs between two jobs, and between two starts of one job."""


@dataclass(frozen=True)
class World:
    """The processes of a running job, seen from one of them."""

    rank: int
    size: int
    device: "torch.device"
    job: str = "single"
    """`Launch.key`."""


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Who this process is, from its environment alone."""
    if env.get("SUBMITIT_EXECUTOR") == "local":
        size = int(env["SUBMITIT_LOCAL_NTASKS"])  # all on this machine
        rank, local_rank = int(env["SUBMITIT_LOCAL_GLOBALID"]), int(env["SUBMITIT_LOCAL_LOCALID"])
        return Launch("submitit", rank, size, local_rank, size, 1, f"local-{env['SUBMITIT_LOCAL_JOB_ID']}")
    under_torchrun = "TORCHELASTIC_RUN_ID" in env
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and not under_torchrun:
        # SLURM_STEP_*: a job's batch script sees SLURM_PROCID too, but only srun's tasks are many
        size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1)))
        nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", 1)))
        key = f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}-{env.get('SLURM_RESTART_COUNT', '0')}"
        rank, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
        return Launch("slurm", rank, size, local_rank, -(-size // nodes), nodes, key)
    if "RANK" in env and "WORLD_SIZE" in env:
        size = int(env["WORLD_SIZE"])
        local_size = int(env.get("LOCAL_WORLD_SIZE", size))
        rank, local_rank = int(env["RANK"]), int(env.get("LOCAL_RANK", 0))
        return Launch("torchrun", rank, size, local_rank, local_size, -(-size // local_size), "torchrun")
    return Launch("single", 0, 1, 0, 1, 1, "single")


def check_world_size(launch: Launch, parallel: ParallelSettings, model: str) -> None:
    """ConfigError when the job has more or fewer processes than the model's layout."""
    wanted = parallel.pipeline * parallel.data * parallel.tensor
    if launch.size != wanted:
        raise ConfigError(
            f"models.{model}.parallel: {parallel.factors}, but {launch.size} were started; "
            f"start {wanted} (python -m cluster.submit does) or change these keys"
        )


def check_offload(parallel: ParallelSettings, model: str) -> None:
    """ConfigError when parameters are to be offloaded from GPUs and there are none."""
    if parallel.offload:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"models.{model}.parallel.offload spares the memory of GPUs, and there is none here; set it to false"
            )


@contextmanager
def before_start(launch: Launch, folder: Path | None = None) -> Iterator[None]:
    """Around what each process checks for itself before they meet: who fails meets the others and tells them.

    `folder` is where they would meet (`started`); None where it is not known yet.
    """
    try:
        yield
    except Exception as error:
        if launch.size == 1:
            raise
        try:
            with _somewhere(launch, folder) as place:
                lifeline = join_lifeline(launch, meet(launch, place, _SHORT))
        except JobError:  # nobody came
            raise _own_error(launch, error) from None
        with lifeline:
            raise _verdict(launch, lifeline, error) from None


@contextmanager
def _somewhere(launch: Launch, folder: Path | None) -> Iterator[Path]:
    """A folder to meet in for processes that failed; what rank 0 makes for that is removed."""
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
def started(launch: Launch, folder: Path) -> Iterator[World]:
    """Join the job's other processes; on leaving, take the process group down again.

    An error inside is printed once: by rank 0 when all processes have it, else by the lowest rank that does, with its
    number. The others leave within seconds and name that rank. Raises JobError when the processes have not all arrived
    within START_TIMEOUT seconds.
    """
    import torch.distributed as dist

    if launch.size == 1:
        device = _choose_device(launch)
        try:
            yield World(0, 1, device, launch.key)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError(describe(error)) from None
        return
    if launch.nodes == 1 and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's host name often resolves to nowhere
    store = meet(launch, folder)
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    with join_lifeline(launch, store) as lifeline:
        on_gpu = False
        try:
            device = _choose_device(launch)
            on_gpu = device.type == "cuda"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(minutes=30),  # the longest a rank may wait for another: a checkpoint on a slow disk
                device_id=device if on_gpu else None,
            )
            yield World(launch.rank, launch.size, device, launch.key)
        except BaseException as error:
            verdict = _verdict(launch, lifeline, error)
            if verdict is error:
                raise
            raise verdict from None
        finally:
            failed = sys.exc_info()[0] is not None
            if dist.is_initialized() and not (on_gpu and failed):  # NCCL would wait for calls that never end
                dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ who failed


def describe(error: BaseException) -> str:
    """An error in one line."""
    if _out_of_memory(error):
        told = (str(error).splitlines() or [""])[0]
        return f"out of memory ({told}); lower train.micro_batch_size, or share the model out among more processes"
    if isinstance(error, ToolkitError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _out_of_memory(error: BaseException) -> bool:
    """Whether the device or the system had no memory left; torch says so in several ways."""
    told = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in told or "not enough memory" in told)
    )


def _own_error(launch: Launch, error: BaseException, others: int = 0) -> BaseException:
    """The error of a process that does not share it with all others, its rank named."""
    if not isinstance(error, ToolkitError | OSError) and not _out_of_memory(error):
        error.add_note(f"(on rank {launch.rank} of {launch.size})")
        return error  # a defect: its traceback is printed
    more = f" and {others} more" if others else ""
    return JobError(f"rank {launch.rank}{more}: {describe(error)}")


def _verdict(launch: Launch, lifeline: Lifeline, error: BaseException) -> BaseException:
    """What this process is to end with, once it is known which others failed, and of what."""
    import torch.distributed as dist

    # NCCL's errors have a class of their own, gloo's are told by the source file they name.
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):
        if lifeline.lost():
            time.sleep(_SPEAKING)
            return JobError(f"{lifeline.others()}; started again, the job continues from its newest checkpoint")
        error = JobError("lost contact with another process of the job; start it again: it continues")
    message = describe(error)
    if not isinstance(error, Exception):  # an interrupt
        lifeline.fail(message, wait=False)
        return error
    alike = sorted(rank for rank, told in lifeline.fail(message).items() if told == message)
    if not isinstance(error, ToolkitError | OSError) and not _out_of_memory(error):
        return _own_error(launch, error)
    if launch.rank != alike[0]:
        time.sleep(_SPEAKING)
        return SystemExit(2)
    if len(alike) < launch.size:
        return _own_error(launch, error, len(alike) - 1)
    return error if isinstance(error, ToolkitError | OSError) else TrainingError(message)


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """`value` of every rank, in order (a collective call over `group`, or over all ranks)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_on_all_ranks(action: Callable[[], Result], group: Any = None) -> Result:
    """`action()` on every rank; what goes wrong on one of them is raised on all (a collective call)."""
    problem: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    for found in all_gather(problem, group):
        if found is not None:
            raise found
    return cast(Result, result)


def _choose_device(launch: Launch) -> "torch.device":
    """The GPU of this process, or the CPU with a fair share of its cores."""
    import torch

    if torch.cuda.is_available():
        # A launcher that shows each process one GPU calls it 0; others show them all.
        device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else launch.local_rank)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        granted = os.environ.get("SLURM_CPUS_PER_TASK") if launch.launcher == "slurm" else None
        threads = int(granted) if granted else max(1, available_cpus() // launch.local_size)
        torch.set_num_threads(threads)
    keep_freed_memory()
    return torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors instead of returning it to the system after every operation.

    A step allocates and frees logits of hundreds of megabytes; mapped anew each time, every page of them is faulted
    in and zeroed again: 0.67 s instead of 1.14 s an iteration at vocabulary 50257, measured on one core.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
