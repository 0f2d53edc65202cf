"""The memory of a process in MB of 2^20 bytes, as Megatron-LM counts it."""

import resource
import sys

import psutil
import torch

_MB = 2**20


def memory(device: torch.device) -> dict[str, float]:
    """Current and peak memory: allocated and reserved on a GPU, resident on a CPU.

    The last figure is the peak of what the process has taken from its device.
    """
    if device.type == "cuda":
        figures = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit  # some kernels update it with a delay
        figures = {"resident": resident, "max resident": max(resident, peak)}
    return {name: value / _MB for name, value in figures.items()}
