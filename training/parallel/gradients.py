"""Between the backward pass and the optimiser: gradients that more than one rank has a part of, and their norm."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.parallel.dtensor import local_shard

_PIECE = 1 << 14  # elements
TIED = "wte.weight"  # the first pipeline stage looks tokens up in it, the last one makes logits of it


def sync_gradients(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> None:
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
    mine = local_shard(parameters[TIED].grad)  # type: ignore[arg-type]
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
                local_shard(parameter.grad).mul_(1 / scale)


def global_norm(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, device: torch.device) -> Tensor:
    """The 2-norm of the whole model's gradient, float64 on `device`, equal on all ranks (a collective call).

    Each rank sums the squares of what it holds. What several ranks hold copies of counts for its share on each of them,
    so that one sum over all ranks gives the whole.
    """
    stages = _pipeline(mesh)
    repeated = stages is not None and stages.get_local_rank() > 0  # the last stage's copy counts once
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


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, float64, shape ().

    On CPUs torch adds a float32 norm up in a few running sums, which is 1e-3 too low at the 38 million elements of a
    GPT-2 embedding. Norms of 2^14 elements are right to 2e-8; their squares are added in float64. This costs 50 ms at
    124M parameters on two cores, where float64 throughout costs half a second. GPUs add up in a tree, which is exact
    enough as it is.
    """
    pieces = [piece for tensor in tensors for piece in _pieces(tensor) if piece.numel()]
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1), _PIECE) if tensor.device.type == "cpu" else (tensor,)


def _copies(tensor: Tensor, mesh: DeviceMesh | None) -> int:
    """On how many ranks of a pipeline stage the elements of a gradient lie that this rank holds."""
    if mesh is None:
        return 1
    copies = mesh["dp"].size() * mesh["tp"].size()
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                copies //= tensor.device_mesh.size(axis)
    return copies


def clip(parameters: Mapping[str, nn.Parameter], largest: float, norm: Tensor) -> None:
    """Scale the gradient, whose global norm is `norm`, to a norm of at most `largest`."""
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), largest, norm.float())  # of the gradients' type


def _pipeline(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The axis of pipeline stages; None where there is one stage."""
    return mesh["pp"] if mesh is not None and mesh["pp"].size() > 1 else None
