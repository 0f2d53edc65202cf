"""Durations on any device: with CUDA's events on a GPU, with the processor's clock elsewhere."""

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seconds(run: Callable[[], object], device: "torch.device") -> float:
    """Duration of `run()` with all work that it gives to the device; waits before and after, not in between."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def median_seconds(run: Callable[[], object], device: "torch.device", repeats: int = 10, warm_up: int = 3) -> float:
    """The median duration of `repeats` runs, after some to warm up."""
    for _ in range(warm_up):
        run()
    return median(seconds(run, device) for _ in range(repeats))


def peak_gigabytes(device: "torch.device") -> float | None:
    """The most memory that tensors have taken since `forget_peak`, in GB of 10^9 bytes; None on CPUs."""
    import torch

    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def forget_peak(device: "torch.device") -> None:
    """Count the peak from now on."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
