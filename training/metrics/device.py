"""A device's memory in MB (2^20 bytes, as in Megatron-LM), and its peak FLOP/s, to which MFU relates.

tflops = flops_per_token(model) * tokens_per_second / world_size / 1e12    # per device
mfu = tflops / peak_tflops(device, "bfloat16")                             # None if the peak is 0: not known
"""

import resource

import psutil
import torch

from training.planning.machines import gpu_of_device
from training.precision import precision_type

_MB = 2**20


def device_name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


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
        resident = psutil.Process().memory_info().rss
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # some kernels update it with a delay
        figures = {"resident": resident, "max resident": max(resident, peak)}
    return {name: value / _MB for name, value in figures.items()}


def peak_tflops(device: torch.device, precision: str, override: float = 0) -> float:
    """The dense peak of one device in TFLOP/s at train.precision, or `override` if it is not 0; 0: not known."""
    if override or device.type != "cuda":
        return override
    found = gpu_of_device(torch.cuda.get_device_name(device), {})
    if found is None:
        return 0
    _, gpu = found
    dtype = precision_type(precision, device)
    if dtype == torch.float32:
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return gpu.tf32_tflops if tf32 and gpu.tf32_tflops else gpu.float32_tflops
    return (dtype == torch.float16 and gpu.float16_tflops) or gpu.bfloat16_tflops
