"""What the kernels over (rows, columns) ask of their tensors: rows, types, and blocks for sums over rows."""

import torch
from torch import Tensor

_BLOCKS = 1056  # of a sum over rows: eight for each of an H100's 132 SMs, whatever the device, so that results repeat
_TILE_WIDTH, _TILE_HEIGHT = 256, 8  # of columns.cuh, where a thread takes eight columns


def rows_of(x: Tensor) -> int:
    """The rows of (…, C)."""
    return x.numel() // x.shape[-1] if x.numel() else 0


def strips(rows: int, columns: int) -> int:
    """How many blocks share the rows of a sum over rows: the rows of its partial sums."""
    tiles = -(-columns // _TILE_WIDTH)
    return min(-(-rows // _TILE_HEIGHT), -(-_BLOCKS // max(1, tiles)))


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
