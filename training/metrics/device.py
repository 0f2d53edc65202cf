"""Measures a device: memory in MB (2^20 bytes, as Megatron-LM), peak TFLOP/s, parts of a step.

    tflops = flops_per_token(model) * tokens_per_second / world_size / 1e12  # per device
    mfu = tflops / peak_tflops(device, "bfloat16")

    with timers("forward"):
        loss = model(batch)
    timers.collect()            # once per step
    timers.take()               # {"forward": seconds since the last take, …}

On a GPU a part is measured by two events in its stream, read once the GPU has passed them: nothing
waits inside a step. Communication that overlaps with the backward pass counts as part of it.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch.cuda import Event

from training.launch.device import precision_type
from training.planning.machines import gpu_of_device

_MB = 2**20
PARTS = ("forward-backward", "forward", "backward", "gradients", "optimizer")
"""The timed parts of a step. A pipeline interleaves forward and backward, and times the sum."""


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
        figures = {"resident": resident, "max resident": max(resident, _peak_resident())}
    return {name: value / _MB for name, value in figures.items()}


def _peak_resident() -> int:
    """Most resident bytes so far; 0: unknown. getrusage's figure begins with the parent's peak."""
    with suppress(OSError):
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return 0


def peak_tflops(device: torch.device, precision: str, override: float = 0) -> float:
    """The dense peak of one device in TFLOP/s; `override` if it is not 0; 0 if it is not known."""
    if override or device.type != "cuda":
        return override
    match = gpu_of_device(torch.cuda.get_device_name(device), {})
    if match is None:
        return 0
    _, gpu = match
    dtype = precision_type(precision, device)
    if dtype == torch.float32:
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return gpu.tf32_tflops if tf32 and gpu.tf32_tflops else gpu.float32_tflops
    return (dtype == torch.float16 and gpu.float16_tflops) or gpu.bfloat16_tflops


class Timers:
    """Seconds by the name of a part; parts may be nested."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, Event, Event]] = deque()  # begin and end, in the order of the ends

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure the part inside `with`."""
        if not self._on_gpu:
            begun = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begun
            return
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((part, begin, end))

    def collect(self) -> None:
        """Read the events that the GPU has passed, without waiting."""
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            part, begin, end = self._pending.popleft()
            self._seconds[part] += begin.elapsed_time(end) / 1000

    def take(self) -> dict[str, float]:
        """The seconds of each part since the last call; waits for the GPU."""
        if self._pending:
            self._pending[-1][2].synchronize()
            self.collect()
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)
