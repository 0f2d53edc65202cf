"""How activations enter and leave the split matrices of tensor parallelism.

    x = enter(x, ranks)   # before a matrix split by rows: whole on every rank; its gradients are summed
    x = leave(x, ranks)   # after a matrix split by columns: the ranks' results are summed

Outside, every rank holds the same activations or, with sequence parallelism, its slice of the sequence. `enter` and
`leave` are each other's gradient: the f and g of Shoeybi et al. 2019, figure 3, or those of Korthikanti et al. 2022,
figure 5. They call the collectives of torch.compile, which a graph may hold.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_collectives = torch.ops._c10d_functional


class TensorRanks(NamedTuple):
    """A tensor-parallel group, and this process in it."""

    group: "GroupName"
    size: int
    rank: int
    slices: bool
    """Sequence parallelism: activations outside the split matrices are slices of the sequence."""

    @classmethod
    def of(cls, mesh: DeviceMesh, sequence_parallel: bool) -> "TensorRanks":
        """The group of a mesh with one axis."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), sequence_parallel)


def enter(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T or T / ranks, C) -> (B, T, C)."""
    entered: Tensor = _Enter.apply(x, ranks)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T, C) -> their sum over the ranks, (B, T or T / ranks, C)."""
    left: Tensor = _Leave.apply(x, ranks)  # type: ignore[no-untyped-call]
    return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gather(x, ranks) if ranks.slices else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.ranks), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.ranks) if ctx.ranks.slices else gradients[0], None


def _sum(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T, C) -> the sum over the ranks, whole or this rank's slice of the sequence."""
    if not ranks.slices:
        return _wait(_collectives.all_reduce(x.contiguous(), "sum", ranks.group))
    B, T, C = x.shape
    slices = x.reshape(B, ranks.size, T // ranks.size, C).transpose(0, 1)  # (B, T, C) -> (ranks, B, T / ranks, C)
    return _wait(_collectives.reduce_scatter_tensor(slices.flatten(0, 1), "sum", ranks.size, ranks.group))


def _gather(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T / ranks, C) -> (B, T, C)."""
    slices = _wait(_collectives.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.group))
    slices = slices.view(ranks.size, *x.shape)  # (ranks * B, T / ranks, C) -> (ranks, B, T / ranks, C)
    return slices.transpose(0, 1).flatten(1, 2)  # (B, T, C)


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _collectives.wait_tensor(x)
    return done
