"""The device that a process trains on, and what has to be set for it."""

import ctypes
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.console import warn
from common.errors import JobError
from common.workers import available_cpus
from training.launch.rank import Launch, node_name

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_SEGMENTS = "expandable_segments:{}"  # of PYTORCH_CUDA_ALLOC_CONF


def precision_type(precision: str, device: "torch.device") -> "torch.dtype":
    """The type of activations and matrix products for `train.precision` on a device.

    Parameters and moments are float32 everywhere. Matrices are rounded to this type once per step:
    into copies, or where they are gathered from data-parallel ranks.
    """
    import torch

    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if fast else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def threads_of(launch: Launch, cpus_per_task: int, env: Mapping[str, str] = os.environ) -> int:
    """The threads of this process: `cluster.cpus_per_task`, never OMP_NUM_THREADS.

    0 stands for the cores that Slurm granted to each task, or for an equal share of this machine's.
    """
    if cpus_per_task:
        return cpus_per_task
    available = available_cpus()
    if launch.launcher != "slurm":
        return max(1, available // launch.local_world_size)
    node = int(env.get("SLURM_CPUS_ON_NODE") or available)
    granted = int(env.get("SLURM_CPUS_PER_TASK") or node // launch.local_world_size)
    return max(1, min(granted, available))  # the batch script's --cpus-per-task is not always that of its srun


def set_threads(launch: Launch, cpus_per_task: int) -> None:
    """Set the threads of torch, and of OpenMP, MKL and OpenBLAS in libraries loaded later.

    Called before torch is imported, it also sets how torch manages GPU memory, unless already set.
    """
    threads = threads_of(launch, cpus_per_task)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    # without it, blocks of many sizes leave gaps in a GPU's memory that no other size can use
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", _SEGMENTS.format(True))
    import torch

    torch.set_num_threads(threads)


def choose_device(launch: Launch, gpus_per_node: int = 0) -> "torch.device":
    """Select this process's GPU, or the CPU.

    Raises JobError if GPUs were asked for and none is visible, or if there are too few of them.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that does not work; it is quoted below
        usable = torch.cuda.is_available()
    if not usable:
        if gpus_per_node:
            raise JobError(
                f"{node_name()}: cluster.gpus_per_node is {gpus_per_node}, but torch sees no GPU "
                f"(CUDA_VISIBLE_DEVICES {_visible()}; {_driver_error()}); set it to 0 to train on CPUs"
            )
        keep_freed_memory()
        return torch.device("cpu")
    # A launcher that shows each process only its own GPU calls it 0; others show all of them.
    count = torch.cuda.device_count()
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise JobError(
            f"{node_name()}: {launch.local_world_size} processes and {count} visible GPUs (CUDA_VISIBLE_DEVICES "
            f"{_visible()}); start one process per GPU, or set CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    _use_segments(device)
    return device


def _use_segments(device: "torch.device") -> None:
    """Test an allocation, and turn expandable segments off if the driver refuses them (gVisor)."""
    import torch

    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != _SEGMENTS.format(True):
            raise
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = _SEGMENTS.format(False)  # for child processes
        torch._C._accelerator_setAllocatorSettings(_SEGMENTS.format(False))
        torch.empty(1, device=device)  # raises any other fault
        warn(f"the driver refuses expandable segments, memory is allocated without: {str(error).splitlines()[0]}")


def _visible() -> str:
    return repr(os.environ["CUDA_VISIBLE_DEVICES"]) if "CUDA_VISIBLE_DEVICES" in os.environ else "not set"


def _driver_error() -> str:
    """Why CUDA cannot be used, as torch or the driver says."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # its class differs from cause to cause
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return "the driver reports no error"


def claim_gpu(launch: Launch, device: "torch.device", store: "Store") -> None:
    """Raises JobError if another process uses the same GPU: NCCL would hang or fail unexplained."""
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    owner = store.compare_set(f"gpu/{node_name()}/{gpu}", "", str(launch.rank)).decode()
    if owner != str(launch.rank):
        raise JobError(
            f"{node_name()}: ranks {owner} and {launch.rank} would share GPU {gpu} (CUDA_VISIBLE_DEVICES "
            f"{_visible()}); start one process per GPU, or set CUDA_VISIBLE_DEVICES= to train on CPUs"
        )


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors instead of returning it to the system each time.

    A step allocates and frees logits of hundreds of megabytes. If they are mapped again each time,
    the kernel faults in and zeroes every page again: 1.14 s per iteration instead of 0.67 s at
    vocabulary 50257, measured on one core.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
