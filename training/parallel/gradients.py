"""Gradients between the backward pass and the optimiser: synchronise, unscale, measure and clip them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training.kernels import adamw as kernels
from training.kernels import library
from training.parallel.dtensor import local_shard

_CHUNK = 1 << 14  # elements
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
    stages = _pipeline_axis(mesh)
    if stages is None or TIED not in parameters:
        return
    other = dist.get_global_rank(stages.get_group(), stages.size() - 1 - stages.get_local_rank())
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
    stages = _pipeline_axis(mesh)
    repeated = stages is not None and stages.get_local_rank() > 0  # the tied embedding counts once
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

    On CPUs torch accumulates a float32 norm in a few running sums, which is 1e-3 too low at the 38 million elements of
    a GPT-2 embedding. Norms of 2^14 elements are accurate to 2e-8; their squares are summed in float64. This costs 50
    ms at 124M parameters on two cores; float64 throughout would cost half a second. GPUs sum in a tree, which is
    accurate enough.
    """
    if tensors and library.selected("sum_of_squares", tensors[0]):
        return kernels.sum_of_squares(tensors)[0]
    chunks = [chunk for tensor in tensors for chunk in _chunks(tensor) if chunk.numel()]
    if not chunks:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(chunks)).double().square().sum()


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1), _CHUNK) if tensor.device.type == "cpu" else (tensor,)


def _copies(tensor: Tensor, mesh: DeviceMesh | None) -> int:
    """How many ranks of a pipeline stage hold a copy of this rank's shard of a gradient."""
    if mesh is None:
        return 1
    copies = mesh["dp"].size() * mesh["tp"].size()
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                copies //= tensor.device_mesh.size(axis)
    return copies


def clip_factor(largest: float, norm: Tensor) -> Tensor:
    """The factor that scales gradients of the global norm `norm` down to a norm of at most `largest`, shape ()."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_


def _pipeline_axis(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh axis of pipeline stages; None if there is only one stage."""
    return mesh["pp"] if mesh is not None and mesh["pp"].size() > 1 else None
