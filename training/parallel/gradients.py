"""Between the backward pass and the optimiser: gradients that more than one rank has a part of, and their norm."""

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.parallel.tensors import local, plain

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
    stages = _pipeline(mesh)
    if stages is None or TIED not in parameters:
        return
    other = dist.get_global_rank(stages.get_group(), stages.size() - 1 - stages.get_local_rank())
    mine = local(parameters[TIED].grad)  # type: ignore[arg-type]
    theirs = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += theirs


def unscale(parameters: Mapping[str, nn.Parameter], scale: float) -> None:
    """Divide all gradients by the loss scale."""
    if scale != 1:
        for parameter in parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(1 / scale)


def global_norm(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> Tensor:
    """The 2-norm of the whole model's gradient (a collective call): a plain tensor, equal on all ranks."""
    stages = _pipeline(mesh)
    repeated = stages is not None and stages.get_local_rank() > 0  # the last stage's copy counts once
    counted = [p.grad for name, p in parameters.items() if p.grad is not None and not (repeated and name == TIED)]
    norm = plain(torch.nn.utils.get_total_norm(counted))
    if stages is not None:
        squared = norm**2
        dist.all_reduce(squared, group=stages.get_group())
        norm = squared.sqrt()
    return norm


def clip(parameters: Mapping[str, nn.Parameter], largest: float, norm: Tensor) -> None:
    """Scale the gradient, whose global norm is `norm`, to a norm of at most `largest`."""
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), largest, norm)


def _pipeline(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The axis of pipeline stages; None where there is one stage."""
    return mesh["pp"] if mesh is not None and mesh["pp"].size() > 1 else None
