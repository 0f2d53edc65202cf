"""What memory a process takes, in MB of 2^20 bytes, as Megatron-LM counts them."""

import resource
import sys

import psutil
import torch

_MB = 2**20


def memory(device: torch.device) -> dict[str, float]:
    """On a GPU what tensors take and what is set aside for them, on a CPU what the process takes: now and at most.

    The last figure is the most that the process has taken of its device.
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
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit  # some kernels note it a little late
        figures = {"resident": resident, "max resident": max(resident, most)}
    return {name: value / _MB for name, value in figures.items()}
