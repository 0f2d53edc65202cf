"""Between the backward pass and the optimiser: gradients that more than one rank has a part of, and their norm."""

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.tensors import local, plain

# A norm is one number: that it is reduced over one axis after the other costs nothing, and needs no warning.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

TIED = "wte.weight"  # the first pipeline stage looks tokens up in it, the last one makes logits of it


def settle(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Make every gradient that of the whole batch (a collective call).

    Gradients come to lie like their parameters: under sequence parallelism each rank has the LayerNorms' of its slice,
    which are summed. Under pipeline parallelism the first and the last stage each have the tied embedding's gradient
    of their use: they swap and add.
    """
    for parameter in parameters.values():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    if mesh is None or mesh["pp"].size() == 1 or TIED not in parameters:
        return
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    other = dist.get_global_rank(mesh.get_group("pp"), size - 1 - rank)
    mine = local(parameters[TIED].grad)  # type: ignore[arg-type]
    theirs = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += theirs


def clip(parameters: Mapping[str, nn.Parameter], largest: float, mesh: DeviceMesh | None) -> Tensor:
    """Scale the gradients down to a norm of `largest` over the whole model, where it is more; returns the norm.

    A collective call; the result is a plain tensor, equal on all ranks.
    """
    pipelined = mesh is not None and mesh["pp"].size() > 1
    repeated = pipelined and mesh is not None and mesh.get_local_rank("pp") > 0  # the last stage's copy counts once
    counted = [p.grad for name, p in parameters.items() if p.grad is not None and not (repeated and name == TIED)]
    norm = plain(torch.nn.utils.get_total_norm(counted))
    if pipelined and mesh is not None:
        squared = norm**2
        dist.all_reduce(squared, group=mesh.get_group("pp"))
        norm = squared.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), largest, norm)
    return norm
