"""The device that a process trains on, and what has to be set for it."""

import ctypes
import os
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.settings import ParallelSettings
from common.workers import available_cpus
from training.parallel.launch import Launch

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def check_offload(parallel: ParallelSettings, model: str) -> None:
    """Raises ConfigError if parameters are to be offloaded from GPUs and this machine has none."""
    if parallel.offload:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"models.{model}.parallel.offload spares the memory of GPUs, and there is none here; set it to false"
            )


def choose_device(launch: Launch) -> "torch.device":
    """Select this process's GPU, or the CPU with a fair share of its cores."""
    import torch

    if torch.cuda.is_available():
        # A launcher that shows each process only its own GPU calls it 0; others show all of them.
        device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else launch.local_rank)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        granted = os.environ.get("SLURM_CPUS_PER_TASK") if launch.launcher == "slurm" else None
        torch.set_num_threads(int(granted) if granted else max(1, available_cpus() // launch.local_world_size))
    keep_freed_memory()
    return torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors instead of returning it to the system after every operation.

    A step allocates and frees logits of hundreds of megabytes. If they are mapped again each time, the kernel faults in
    and zeroes every page again: 1.14 s per iteration instead of 0.67 s at vocabulary 50257, measured on one core.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
