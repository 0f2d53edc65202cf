"""Inputs for kernels: any size, any dtype, any alignment, with margins that no kernel may touch."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MARGIN = 64  # elements, a multiple of 16 bytes in every dtype

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Half a unit in the last place of each dtype, relative, with room for float32 arithmetic in between."""


def place(values: Tensor, device: torch.device, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """The values as a contiguous tensor that begins `offset` elements after a multiple of 16 bytes."""
    buffer = torch.full((MARGIN + offset + values.numel() + MARGIN,), torch.nan, dtype=dtype, device=device)
    assert buffer.data_ptr() % 16 == 0
    view = buffer[MARGIN + offset : MARGIN + offset + values.numel()].view(values.shape)
    return view.copy_(values)


def assert_margins_untouched(view: Tensor) -> None:
    """Nothing was written beside a tensor of `place`."""
    buffer = view._base
    assert buffer is not None
    start = view.storage_offset()
    assert buffer[:start].isnan().all() and buffer[start + view.numel() :].isnan().all()


def assert_near(found: Tensor, expected: Tensor, *, absolute: float = 0.0) -> None:
    """`found` is `expected`, a float64 result, to the rounding of found's dtype."""
    torch.testing.assert_close(
        found.double().cpu(), expected.double().cpu(), rtol=ROUNDING[found.dtype], atol=absolute or 1e-6
    )
