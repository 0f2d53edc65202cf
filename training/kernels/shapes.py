"""What the kernels over (rows, columns) ask of their tensors: rows, types, and blocks for sums over rows."""

import torch
from torch import Tensor

# Blocks of a sum over rows: five for each of an H100's 132 SMs, so many as run at once. The same on every device, so
# that the order of a sum does not depend on it.
_BLOCKS = 660
_TILE_WIDTH, _TILE_HEIGHT = 256, 8  # of columns.cuh, where a thread takes eight columns


def rows_of(x: Tensor) -> int:
    """The rows of (…, C)."""
    return x.numel() // x.shape[-1] if x.numel() else 0


def strips(rows: int, columns: int) -> int:
    """How many blocks share the rows of a sum over rows: the rows of its partial sums."""
    tiles = max(1, -(-columns // _TILE_WIDTH))
    return min(-(-rows // _TILE_HEIGHT), max(1, _BLOCKS // tiles))


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The same, contiguous; None stays None."""
    return None if tensor is None else tensor.contiguous()


def check_pair(wide: Tensor, narrow: Tensor) -> None:
    """Raise ValueError unless the types are equal, or float32 and a 16-bit type."""
    if narrow.dtype != wide.dtype and wide.dtype != torch.float32:
        raise ValueError(f"{form(narrow)} beside {form(wide)}: types must be equal, or the second float32")


def check_columns(x: Tensor, parameter: Tensor | None, dtype: torch.dtype) -> None:
    """Raise ValueError for a bias or weight that has not the size of x's last dimension, or another type."""
    if parameter is not None and (parameter.shape != x.shape[-1:] or parameter.dtype != dtype):
        raise ValueError(f"a bias or weight {form(parameter)} beside {form(x)}: must be ({x.shape[-1]},) and {dtype}")


def form(tensor: Tensor) -> str:
    """A tensor's type and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
