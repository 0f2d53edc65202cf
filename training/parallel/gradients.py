"""Gradients between the backward pass and the optimiser: synchronise, unscale, measure and clip them."""

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.kernels.adamw import sum_of_squares
from training.parallel.dtensor import local_shard

PP, DP, TP = range(3)  # axes of the mesh, by number: `mesh["dp"]` makes a new mesh, 0.13 ms each time
TIED = "wte.weight"  # the first pipeline stage looks up tokens in it, the last one computes logits with it


def sync_gradients(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Complete the gradients that several ranks hold parts of (a collective call).

    Redistribute each gradient to its parameter's placements: under sequence parallelism this sums the LayerNorm
    gradients of the ranks' slices. Under pipeline parallelism the first and the last stage each have a gradient of the
    tied embedding; they exchange and add them.
    """
    for parameter in parameters.values():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    if mesh is None or mesh.size(PP) == 1 or TIED not in parameters:
        return
    other = dist.get_global_rank(mesh.get_group(PP), mesh.size(PP) - 1 - mesh.get_local_rank(PP))
    mine = local_shard(parameters[TIED].grad)  # type: ignore[arg-type]
    theirs = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += theirs


def global_norm(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, device: torch.device) -> Tensor:
    """The 2-norm of the whole model's gradient, float64 on `device`, equal on all ranks (a collective call).

    Each rank sums the squares of its shards, divided by the number of ranks that hold a copy, so that one sum over all
    ranks gives the total.
    """
    repeated = mesh is not None and mesh.get_local_rank(PP) > 0  # the tied embedding counts once
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: defaultdict[int, list[Tensor]] = defaultdict(list)
    for name, parameter in parameters.items():
        if parameter.grad is not None and not (repeated and name == TIED):
            by_copies[_copies(parameter.grad, mesh)].append(local_shard(parameter.grad))
    for copies, gradients in by_copies.items():
        squares += sum_of_squares(gradients).to(device) / copies
    if mesh is not None:
        dist.all_reduce(squares)
    return squares.sqrt()


def _copies(tensor: Tensor, mesh: DeviceMesh | None) -> int:
    """How many ranks of a pipeline stage hold a copy of this rank's shard of a gradient."""
    if mesh is None:
        return 1
    copies = mesh.size(DP) * mesh.size(TP)
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                copies //= tensor.device_mesh.size(axis)
    return copies


def clip_factor(largest: float, norm: Tensor) -> Tensor:
    """The factor that scales gradients of the global norm `norm` down to a norm of at most `largest`, shape ()."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
