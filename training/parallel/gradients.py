"""Gradients between the backward pass and the optimiser: synchronise and measure them."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from training.kernels.adamw import sum_of_squares
from training.parallel.dtensor import local_shard
from training.tensors import leaf_of

PP, DP, TP = range(3)  # axes of the mesh, by number: `mesh["dp"]` makes a new mesh, 0.13 ms each time
TIED = "wte.weight"  # the first pipeline stage looks up tokens in it, the last one computes logits with it


@torch.no_grad()
def sync_gradients(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, sequence_parallel: bool) -> None:
    """Complete the gradients that several ranks hold parts of (a collective call).

    Under sequence parallelism this sums the gradients of biases, LayerNorms and positions over the
    slices of the sequence, all in one buffer. Under pipeline parallelism the first and the last
    stage each have a gradient of the tied embedding; they exchange and add them.
    """
    if mesh is None:
        return
    if sequence_parallel:
        parts = [local_shard(each.grad) for name, each in parameters.items() if leaf_of(name).split is None]  # type: ignore[arg-type]
        buffer = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(buffer, group=mesh.get_group(TP))
        sums = torch.split(buffer, [part.numel() for part in parts])
        torch._foreach_copy_(parts, [each.view_as(part) for each, part in zip(sums, parts, strict=True)])
    if mesh.size(PP) == 1 or TIED not in parameters:
        return
    other = dist.get_global_rank(mesh.get_group(PP), mesh.size(PP) - 1 - mesh.get_local_rank(PP))
    mine = local_shard(parameters[TIED].grad)  # type: ignore[arg-type]
    theirs = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += theirs


@torch.no_grad()
def global_norm(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, device: torch.device) -> Tensor:
    """The 2-norm of the whole model's gradient, float64, equal on all ranks (a collective call).

    Each rank sums the squares of its shards, divided by the number of ranks that hold a copy, so
    that one sum over all ranks gives the total.
    """
    ranks = 1 if mesh is None else mesh.size(DP) * mesh.size(TP)  # that hold shards or copies of a gradient
    repeated = mesh is not None and mesh.get_local_rank(PP) > 0  # the tied embedding counts once
    squares = torch.zeros((), dtype=torch.float64, device=device)
    alike: defaultdict[tuple[Placement, ...], list[Any]] = defaultdict(list)
    for name, parameter in parameters.items():
        if parameter.grad is not None and not (repeated and name == TIED):
            alike[getattr(parameter.grad, "placements", ())].append(parameter.grad)
    for placements, gradients in alike.items():
        split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        copies = ranks // math.prod(gradients[0].device_mesh.size(axis) for axis in split)
        squares += sum_of_squares([*map(local_shard, gradients)]).to(device) / copies
    if mesh is not None:
        dist.all_reduce(squares)
    return squares.sqrt()
