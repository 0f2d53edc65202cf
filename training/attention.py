"""Chooses PyTorch's attention kernel on a GPU: the one that the settings name, or the fastest for the run's shapes.

    times = measure(Shape(samples=16, heads=16, tokens=1024, head_size=64), torch.bfloat16, dropout=0.0)
    use(fastest(times))

Dropout decides as much as the shape: cuDNN's kernel may be several times slower with it. The choice is global, so that
compiled graphs hold it as well; on CPUs there is nothing to choose.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from common.errors import ConfigError

KERNELS = ("flash", "cudnn", "efficient", "math")
_SWITCHES = ("flash", "cudnn", "mem_efficient", "math")  # torch's names of the same
REPEATABLE = ("flash", "math")
"""Those whose gradients are the same bits in every run under `torch.use_deterministic_algorithms`."""

_WARM_UP, _REPEATS = 3, 10


class Shape(NamedTuple):
    """The inputs of one layer's attention on one rank."""

    samples: int
    heads: int
    tokens: int
    head_size: int


def use(kernel: str) -> None:
    """Let attention run in this kernel alone, from now on."""
    _enable([name == kernel for name in KERNELS])


def measure(shape: Shape, dtype: torch.dtype, dropout: float, kernels: Sequence[str] = KERNELS) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass on the current GPU, by kernel; those that cannot run are left out.

    Which kernels are enabled is restored.
    """
    before = _enabled()
    times = {}
    try:
        for kernel in kernels:
            use(kernel)
            try:
                times[kernel] = _time(shape, dtype, dropout)
            except RuntimeError:  # no such kernel for this GPU, type or shape; or out of memory
                torch.cuda.empty_cache()
    finally:
        _enable(before)
    return times


def fastest(times: dict[str, float], deterministic: bool = False) -> str:
    """The fastest kernel. Raises ConfigError if none can run."""
    allowed = {kernel: time for kernel, time in times.items() if kernel in REPEATABLE or not deterministic}
    if not allowed:
        raise ConfigError(
            "no allowed attention kernel runs on this GPU with these shapes; set train.attention to auto, or lower "
            "train.micro_batch_size"
        )
    return min(allowed, key=lambda kernel: allowed[kernel])


def _enabled() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SWITCHES]


def _enable(switches: list[bool]) -> None:
    for name, on in zip(_SWITCHES, switches, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def _time(shape: Shape, dtype: torch.dtype, dropout: float) -> float:
    # as the model makes them: heads are slices of one (B, T, 3C) product
    qkv = torch.randn(shape.samples, shape.tokens, shape.heads, 3, shape.head_size, dtype=dtype, device="cuda")
    q, k, v = (part.requires_grad_() for part in qkv.transpose(1, 2).unbind(dim=3))
    gradient = torch.randn_like(q)

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    for _ in range(_WARM_UP):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / _REPEATS
