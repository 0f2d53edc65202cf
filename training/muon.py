"""Muon (Jordan et al. 2024): the step of a matrix is its momentum, made orthogonal, in every parallel layout.

    muon = Muon(matrices, weight_decay, momentum=0.95, n_head=12, mesh=mesh)
    muon.step(exp_avgs, gradients, rate=3e-4)

As torch.optim.Muon with `match_rms_adamw`: Nesterov momentum, decoupled weight decay, and steps times
0.2 sqrt(max(rows, columns)), so that they are as large as AdamW's and its learning rates carry over (Liu et al. 2025,
section 2.2). Queries, keys and values are orthogonalised each for itself.

Newton-Schulz needs whole matrices. Each rank orthogonalises its share of them: the ranks of a pipeline stage send it
their shards and get back those of the result, in two all-to-alls for every group of as many matrices as ranks. So each
layout computes what one process computes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.workers import batched
from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard, region, shard_bounds
from training.tensors import QKV

RMS = 0.2  # of an update's elements, as large as AdamW's usually are
STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan et al.: of singular values from .01 to 1, five steps make .68 to 1.13
_EPS = 1e-7


class Part(NamedTuple):
    """A rectangle of a matrix."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with about the same singular vectors, and singular values near 1: (k, rows, columns) -> the same shape.

    Five steps of a quintic Newton-Schulz iteration in the type of the argument.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(STEPS):
        gram = x @ x.mT  # (k, m, n) -> (k, m, m), with m <= n
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    made: Tensor = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return made


def _stage_group(mesh: DeviceMesh) -> Any:
    """The process group of this process's pipeline stage (a collective call over all ranks)."""
    mine, _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(1).tolist())  # type: ignore[no-untyped-call]
    return mine


def _one_holder_each(parts: Sequence[Part], owner: int) -> list[int]:
    """One rank for each distinct part that is not empty: the owner where it has it, else the first that does."""
    first = {part: rank for rank, part in reversed(list(enumerate(parts)))}
    first[parts[owner]] = owner
    return sorted(rank for part, rank in first.items() if part.size)


class Muon:
    """The matrices of one pipeline stage, split over its ranks in any way, and which rank orthogonalises which."""

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        weight_decay: Mapping[str, float],
        momentum: float,
        n_head: int,
        mesh: DeviceMesh | None,
    ) -> None:
        """`matrices`: this process's, by name; the ranks of a stage have the same ones (a collective call)."""
        self.momentum, self.n_head = momentum, n_head
        self.names = sorted(matrices, key=lambda name: (tuple(matrices[name].shape), name))  # alike in a group
        self.matrices = [matrices[name] for name in self.names]
        self.weight_decay = [weight_decay[name] for name in self.names]
        self.group = None if mesh is None else _stage_group(mesh)
        self.rank, self.ranks = (0, 1) if mesh is None else (dist.get_rank(self.group), dist.get_world_size(self.group))
        self.device = torch.device(mesh.device_type if mesh is not None else self.matrices[0].device.type)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # of Newton-Schulz and its traffic
        parts = [Part(*shard_bounds(matrix)) for matrix in self.matrices]
        held: list[list[Part]] = [parts] if mesh is None else all_gather(parts, self.group)
        self.parts = list(zip(*held, strict=True))
        """Of each matrix, the parts that the ranks hold."""
        self.senders = [_one_holder_each(parts, index % self.ranks) for index, parts in enumerate(self.parts)]
        """The ranks that together have all of a matrix; its owner, if it can, is one of them."""

    def step(self, exp_avgs: list[Tensor], gradients: list[Tensor], rate: float) -> None:
        """One step of all `matrices` in place; `exp_avgs`, `gradients`: this rank's shards in their order.

        The gradients are overwritten.
        """
        shards = [local_shard(matrix) for matrix in self.matrices]
        torch._foreach_lerp_(exp_avgs, gradients, 1 - self.momentum)
        torch._foreach_lerp_(gradients, exp_avgs, self.momentum)  # Nesterov
        torch._foreach_mul_(shards, [1 - rate * decay for decay in self.weight_decay])
        for group in batched(range(len(self.names)), self.ranks):
            for index, update in zip(group, self._orthogonal_shards(group, gradients), strict=True):
                rows, columns = self._orthogonalized(index)[1:]
                size = RMS * math.sqrt(max(rows, columns))
                shards[index].add_(update.to(shards[index].device), alpha=-rate * size)

    def _orthogonalized(self, index: int) -> tuple[int, int, int]:
        """What is orthogonalised of a matrix: how many, rows, columns."""
        rows, columns = self.matrices[index].shape
        return (3, rows // 3, columns) if self.names[index].endswith(f"{QKV}.weight") else (1, rows, columns)

    def _orthogonal(self, index: int, update: Tensor) -> Tensor:
        """(rows, columns) -> the same shape."""
        count, rows, columns = self._orthogonalized(index)
        heads = self.n_head if count == 3 else 1
        parts = update.view(heads, count, rows // heads, columns).transpose(0, 1)  # [head, (q, k, v), dim] -> (q, k, v)
        made = orthogonal(parts.reshape(count, rows, columns))
        return made.view(count, heads, rows // heads, columns).transpose(0, 1).reshape(update.shape)

    def _orthogonal_shards(self, group: list[int], updates: list[Tensor]) -> list[Tensor]:
        """This rank's shards of the matrices of a group, after each was made orthogonal (a collective call).

        The first matrix is the first rank's to do, and so on.
        """
        if self.group is None:
            return [self._orthogonal(index, updates[index].to(self.dtype)) for index in group]
        nothing, mine = updates[0].new_empty(0), group[self.rank] if self.rank < len(group) else None
        sent = [updates[index] if self.rank in self.senders[index] else nothing for index in group]
        sizes = [0] * self.ranks
        if mine is not None:
            sizes = [part.size if rank in self.senders[mine] else 0 for rank, part in enumerate(self.parts[mine])]
        received = self._all_to_all(sent, sizes)
        results: list[Tensor] = []
        if mine is not None:
            whole = received[0].new_empty(self.matrices[mine].shape)
            for rank in self.senders[mine]:
                part = self.parts[mine][rank]
                whole[region(*part)] = received[rank].view(part.shape)
            whole = self._orthogonal(mine, whole)
            results = [whole[region(*part)] for part in self.parts[mine]]
        shards = self._all_to_all(results, [self.parts[index][self.rank].size for index in group])
        return [shard.view(self.parts[index][self.rank].shape) for index, shard in zip(group, shards, strict=False)]

    def _all_to_all(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send a tensor to each of the first ranks, and receive one of so many elements from each (a collective call).

        In the type of the products.
        """
        sizes += [0] * (self.ranks - len(sizes))
        counts = [each.numel() for each in sent] + [0] * (self.ranks - len(sent))
        flat = [each.flatten().to(self.device, self.dtype) for each in sent]
        buffer = torch.cat(flat) if flat else torch.empty(0, device=self.device, dtype=self.dtype)
        received = buffer.new_empty(sum(sizes))
        dist.all_to_all_single(received, buffer, sizes, counts, group=self.group)
        return list(torch.split(received, sizes))
