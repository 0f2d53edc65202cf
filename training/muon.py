"""Muon (Jordan et al. 2024): the step of a matrix is its momentum, made orthogonal, in any layout.

    muon = Muon(matrices, weight_decay, momentum=0.95, n_head=12, mesh=mesh)
    muon.step(exp_avgs, gradients, rate=3e-4)

As torch.optim.Muon with `match_rms_adamw`: Nesterov momentum, decoupled weight decay, and steps
times 0.2 sqrt(max(rows, columns)), so that they are as large as AdamW's and its learning rates
carry over (Liu et al. 2025, section 2.2). Queries, keys and values are orthogonalised separately.

Newton-Schulz needs whole matrices. The ranks of a pipeline stage take groups of as many matrices as
ranks. In a group, each rank receives the shards of one matrix, orthogonalises it, and returns each
rank's shard of the result: two all-to-alls per group. So each layout computes what one process
computes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.workers import batched
from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard, shard_region
from training.region import Region
from training.tensors import QKV

RMS = 0.2  # of an update's elements, as large as AdamW's usually are
STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan et al.: five steps turn singular values of .01 to 1 into .68 to 1.13
_EPS = 1e-7


def orthogonal(matrices: Tensor) -> Tensor:
    """About the same singular vectors, and values near 1: (k, rows, columns) -> the same shape.

    Five steps of a quintic Newton-Schulz iteration in the type of the argument.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(STEPS):
        gram = x @ x.mT  # (k, m, n) -> (k, m, m), with m <= n
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    result: Tensor = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return result


def _one_holder_each(regions: Sequence[Region], owner: int) -> list[int]:
    """One rank per distinct nonempty region: `owner` if it holds it, else the first that does."""
    first = {region: rank for rank, region in reversed(list(enumerate(regions)))}
    first[regions[owner]] = owner
    return sorted(rank for region, rank in first.items() if region.size)


class Muon:
    """The matrices of one pipeline stage, split over its ranks in any way."""

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        weight_decay: Mapping[str, float],
        momentum: float,
        n_head: int,
        mesh: DeviceMesh | None,
    ) -> None:
        """`matrices`: by name; the ranks of a stage have the same names (a collective call)."""
        self.momentum, self.n_head = momentum, n_head
        self.names = sorted(matrices, key=lambda name: (tuple(matrices[name].shape), name))  # alike in a group
        self.matrices = [matrices[name] for name in self.names]
        self.weight_decay = [weight_decay[name] for name in self.names]
        regions = [shard_region(matrix) for matrix in self.matrices]
        self.group: Any = None
        if mesh is None:
            self.rank, self.ranks, of_ranks = 0, 1, [regions]
            self.device = torch.device(self.matrices[0].device.type)
        else:
            stages = mesh.mesh.flatten(1).tolist()
            self.group, _ = dist.new_subgroups_by_enumeration(stages)  # type: ignore[no-untyped-call]
            self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            self.device, of_ranks = torch.device(mesh.device_type), all_gather(regions, self.group)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # of Newton-Schulz and its traffic
        self.regions: list[tuple[Region, ...]] = list(zip(*of_ranks, strict=True))
        """Of each matrix, the region that each rank holds."""
        self.senders = [_one_holder_each(regions, index % self.ranks) for index, regions in enumerate(self.regions)]
        """Ranks that together hold all of each matrix; its owner is one of them if possible."""

    def step(self, exp_avgs: list[Tensor], gradients: list[Tensor], rate: float) -> None:
        """One step of all `matrices`, in place; overwrites the gradients.

        `exp_avgs` and `gradients` are this rank's shards in the order of `matrices`.
        """
        shards = [local_shard(matrix) for matrix in self.matrices]
        torch._foreach_lerp_(exp_avgs, gradients, 1 - self.momentum)
        torch._foreach_lerp_(gradients, exp_avgs, self.momentum)  # Nesterov
        torch._foreach_mul_(shards, [1 - rate * decay for decay in self.weight_decay])
        for group in batched(range(len(self.names)), self.ranks):
            for index, update in zip(group, self._orthogonal_shards(group, gradients), strict=True):
                _, rows, columns = self._orthogonalized(index)
                size = RMS * math.sqrt(max(rows, columns))
                shards[index].add_(update.to(shards[index].device), alpha=-rate * size)

    def _orthogonalized(self, index: int) -> tuple[int, int, int]:
        """How many matrices are orthogonalised in one, and their rows and columns."""
        rows, columns = self.matrices[index].shape
        return (3, rows // 3, columns) if self.names[index].endswith(f"{QKV}.weight") else (1, rows, columns)

    def _orthogonal(self, index: int, update: Tensor) -> Tensor:
        """(rows, columns) -> the same shape."""
        count, rows, columns = self._orthogonalized(index)
        heads = self.n_head if count == 3 else 1
        parts = update.view(heads, count, rows // heads, columns).transpose(0, 1)  # [head, (q, k, v), dim] -> (q, k, v)
        result = orthogonal(parts.reshape(count, rows, columns))
        return result.view(count, heads, rows // heads, columns).transpose(0, 1).reshape(update.shape)

    def _orthogonal_shards(self, group: list[int], updates: list[Tensor]) -> list[Tensor]:
        """This rank's shards after each rank i has orthogonalised matrix i (a collective call)."""
        if self.group is None:
            return [self._orthogonal(index, updates[index].to(self.dtype)) for index in group]
        mine = group[self.rank] if self.rank < len(group) else None
        sizes = [0] * self.ranks
        if mine is not None:
            sizes = [region.size * (rank in self.senders[mine]) for rank, region in enumerate(self.regions[mine])]
        nothing = updates[0].new_empty(0)
        sent = [updates[index] if self.rank in self.senders[index] else nothing for index in group]
        received, results = self._all_to_all(sent, sizes), list[Tensor]()
        if mine is not None:
            whole = received[0].new_empty(self.matrices[mine].shape)
            for rank in self.senders[mine]:
                region = self.regions[mine][rank]
                whole[region.slices] = received[rank].view(region.shape)
            whole = self._orthogonal(mine, whole)
            results = [whole[region.slices] for region in self.regions[mine]]
        held = [self.regions[index][self.rank] for index in group]
        shards = self._all_to_all(results, [region.size for region in held])
        return [shard.view(region.shape) for region, shard in zip(held, shards, strict=False)]

    def _all_to_all(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send tensor i to rank i; returns `sizes[i]` elements of rank i (a collective call).

        Both are sent as `dtype`; missing ones are empty.
        """
        sizes = sizes + [0] * (self.ranks - len(sizes))
        nothing = torch.empty(0, device=self.device, dtype=self.dtype)
        flat = [each.flatten().to(nothing) for each in sent] + [nothing] * (self.ranks - len(sent))
        received = nothing.new_empty(sum(sizes))
        counts = [each.numel() for each in flat]
        dist.all_to_all_single(received, torch.cat(flat), sizes, counts, group=self.group)
        return list(torch.split(received, sizes))
