"""Whole tensors and the shards that a process holds, for plain tensors and DTensors alike.

PyTorch's DTensor takes a second to import: commands that only read files do not wait for it.
"""

import torch
from torch import Tensor

from training.region import Region


def true_shape(name: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    """The shape of a parameter (or a moment of it) without the padding rows of wte."""
    return torch.Size((vocab_size, *tensor.shape[1:])) if name == "wte.weight" else tensor.shape


def copy_shard_(target: Tensor, whole: Tensor) -> None:
    """Copy this process's shard of `whole` into `target`; rows missing in `whole` become zero."""
    missing = target.shape[0] - whole.shape[0]
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    whole = whole[shard_region(target).slices]
    with torch.no_grad():
        local_shard(target).copy_(whole)


def shard_region(tensor: Tensor) -> Region:
    """The region of the whole tensor that this process holds."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offset), tuple(shape))


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, or the tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
