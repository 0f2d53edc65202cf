"""Starting the processes of a job: who am I, where do we meet, on which device.

    with started(settings, folder) as world: ...

Who: submitit's local executor, then Slurm (srun, which submitit's Slurm executor uses too), then torchrun, then one
process alone. A torchrun inside a Slurm job wins over Slurm's variables, which then describe its launcher.
Where: no port is ever guessed. Rank 0 binds a free one, and its address travels in a file in the run folder whose name
carries the job id and restart count; torchrun brings a meeting point of its own.
"""

import ctypes
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, JobError, ToolkitError
from common.files import write_text
from common.settings import ParallelSettings
from common.workers import available_cpus

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
START_TIMEOUT = 300.0  # seconds for all processes to meet: slow nodes import torch from a cold network file system


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


@contextmanager
def one_voice(rank: int) -> Iterator[None]:
    """Around checks that fail on all ranks alike: rank 0 tells, the others leave with code 2 and no word."""
    try:
        yield
    except ToolkitError:
        if rank == 0:
            raise
        raise SystemExit(2) from None


@contextmanager
def started(launch: Launch, folder: Path) -> Iterator[World]:
    """Join the job's other processes; on leaving, take the process group down again.

    Raises JobError when they have not all arrived within START_TIMEOUT seconds, or when one of them dies later on.
    """
    import torch.distributed as dist

    device = _choose_device(launch)
    if launch.size == 1:
        yield World(0, 1, device, launch.key)
        return
    if launch.nodes == 1 and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's host name often resolves to nowhere
    store: Store | None = None
    if launch.launcher != "torchrun":
        store = meet(launch, folder)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=launch.rank if store else -1,
        world_size=launch.size if store else -1,
        timeout=timedelta(minutes=30),  # the longest a rank may wait for another: a checkpoint on a slow disk
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield World(launch.rank, launch.size, device, launch.key)
    except RuntimeError as error:
        # NCCL's errors have a class of their own, gloo's are told by the source file they name.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise JobError(
                f"rank {launch.rank} lost contact with another process of the job, whose log says why; "
                "start the job again: it continues from its newest checkpoint"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


def gathered(value: Any, group: Any = None) -> list[Any]:
    """`value` of every rank, in order (a collective call over `group`, or over all ranks)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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


# ------------------------------------------------------------------------------------------------ meeting point


def meet(launch: Launch, folder: Path, timeout: float = START_TIMEOUT) -> "Store":
    """A store shared by all processes of the job, served by rank 0 on a port that the system chose.

    Rank 0 writes "host:port" to a file in `folder`, the others wait for it; once all have come the file is removed.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    meeting = folder / f"meeting-{launch.key}"
    deadline = time.monotonic() + timeout
    try:
        store = _serve(launch, meeting, timeout) if launch.rank == 0 else _join(launch, meeting, deadline)
        store.set(f"here/{launch.rank}", "yes")
        if launch.rank == 0:
            store.wait([f"here/{rank}" for rank in range(launch.size)], timedelta(seconds=timeout))
    except (DistStoreError, DistNetworkError, TimeoutError):
        raise JobError(
            f"{meeting}: the {launch.size} processes of the job did not meet within {timeout:.0f} s "
            f"(rank {launch.rank} waited); did they all start, and do they see the same folder?"
        ) from None
    finally:
        if launch.rank == 0:
            meeting.unlink(missing_ok=True)
    return store


def _serve(launch: Launch, meeting: Path, timeout: float) -> "Store":
    """Rank 0: listen on a free port, then publish it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    one_node = launch.nodes == 1
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if one_node else "", 0))
    listener.listen(launch.size)
    port = listener.getsockname()[1]
    # The host's name, not its address as seen from itself: Debian resolves a machine's own name to 127.0.1.1.
    host = "127.0.0.1" if one_node else socket.gethostname()
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # from here on the store owns the socket
    )
    write_text(meeting, f"{host}:{port}\n")
    return store


def _join(launch: Launch, meeting: Path, deadline: float) -> "Store":
    """Ranks 1 and up: wait for the address; one left by a killed start is refused and read again."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    while time.monotonic() < deadline:
        try:
            host, _, port = meeting.read_text(encoding="utf-8").strip().rpartition(":")
            attempt = timedelta(seconds=2)  # an address that nobody serves is tried this long, then read again
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=attempt)
            store.set_timeout(timedelta(seconds=START_TIMEOUT))
            return store
        except (FileNotFoundError, DistNetworkError):
            time.sleep(0.05)
    raise TimeoutError
