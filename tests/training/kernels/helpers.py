"""Inputs for kernels: any size, any dtype, any alignment, with margins that no kernel may touch."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MARGIN = 64  # elements, a multiple of 16 bytes in every dtype

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi
echo "$$ $@" >> "{calls}"
while [ "$1" != -o ]; do shift; done
echo partial > "$2"
{body}
echo library > "$2"
"""

# the same examples in every session: tolerances hold for all that were seen
some_examples = settings(max_examples=24, derandomize=True, suppress_health_check=list(HealthCheck))
offsets = st.integers(0, 3)  # elements between the address and a multiple of 16 bytes


def draw(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def place(values: Tensor, device: torch.device, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """The values as a contiguous tensor, `offset` elements after a multiple of 16 bytes."""
    buffer = torch.full((MARGIN + offset + values.numel() + MARGIN,), torch.nan, dtype=dtype, device=device)
    assert buffer.data_ptr() % 16 == 0
    view = buffer[MARGIN + offset : MARGIN + offset + values.numel()].view(values.shape)
    return view.copy_(values)


def assert_margins_untouched(*views: Tensor) -> None:
    """Nothing was written beside tensors of `place`."""
    for view in views:
        buffer = view._base
        assert buffer is not None
        start = view.storage_offset()
        assert buffer[:start].isnan().all() and buffer[start + view.numel() :].isnan().all()


def write_nvcc(folder: Path, patch: pytest.MonkeyPatch, body: str = "") -> Path:
    """A script as nvcc, which runs `body` to compile, and an empty cache; returns its calls."""
    script, calls = folder / "cuda/bin/nvcc", folder / "calls"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(NVCC.format(calls=calls, body=body))
    script.chmod(0o755)
    patch.setenv("CUDA_HOME", str(folder / "cuda"))
    patch.setenv("URLS_TO_GPT2_KERNELS", str(folder / "cache"))
    return calls
