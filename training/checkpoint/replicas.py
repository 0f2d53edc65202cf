"""Parameters that several ranks hold copies of: are they still copies?

Tensor-parallel ranks each have the LayerNorms, the positions and the output biases, data-parallel ranks under ZeRO 0
have everything, the first and the last pipeline stage have the tied embedding. All of them compute the same updates,
so that they stay equal bit for bit, unless something is wrong: a kernel that is not deterministic, a defective device.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard

_MEASURED = 20  # differences measured; more names are only named

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, shape and place in the whole of what a rank holds of a parameter."""


@dataclass(frozen=True)
class Replicas:
    """What came of a comparison; equal on all ranks."""

    compared: list[str] = field(default_factory=list)
    """Parameters of which several ranks hold the same part."""
    drifted: dict[str, float | None] = field(default_factory=dict)
    """The largest difference between two copies, of those that differ; None where it was not measured."""

    def warning(self) -> str:
        """One line, empty when all is well."""
        if not self.drifted:
            return ""
        name, largest = next(iter(self.drifted.items()))
        return (
            f"{len(self.drifted)} of {len(self.compared)} parameters differ between ranks that hold copies of "
            f"them, {name} by up to {largest:g}; the checkpoint's manifest.json names all, and has one copy of each"
        )


def compare_replicas(parameters: Mapping[str, nn.Parameter]) -> Replicas:
    """Compare the copies of all parameters, bit for bit (a collective call). Nothing to do in a single process."""
    if not dist.is_initialized():
        return Replicas()
    parts = {_part(name, parameter): local_shard(parameter.detach()) for name, parameter in parameters.items()}
    parts = {part: tensor for part, tensor in parts.items() if tensor.numel()}
    holders = Counter(part for held in all_gather(list(parts)) for part in held)
    shared = [part for part in parts if holders[part] > 1]
    digests: dict[Part, set[bytes]] = {}
    for one in all_gather({part: _digest(parts[part]) for part in shared}):
        for part, digest in one.items():
            digests.setdefault(part, set()).add(digest)
    drifted: dict[str, float | None] = {}
    for number, part in enumerate(sorted(part for part, seen in digests.items() if len(seen) > 1)):
        name, shape, _ = part
        if number < _MEASURED:
            difference = _largest_difference(parts.get(part), shape, parameters)
            drifted[name] = max(difference, drifted.get(name) or 0.0)
        else:
            drifted.setdefault(name, None)
    return Replicas(sorted({name for name, *_ in digests}), drifted)


def _part(name: str, parameter: Tensor) -> Part:
    if not isinstance(parameter, DTensor):
        return name, tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return name, tuple(shape), tuple(offset)


def _digest(tensor: Tensor) -> bytes:
    """Of the bits of a tensor: one copy of it at a time is in the CPU's memory."""
    return xxhash.xxh3_128_digest(tensor.cpu().contiguous().numpy().data)


def _largest_difference(mine: Tensor | None, shape: tuple[int, ...], parameters: Mapping[str, Tensor]) -> float:
    """Between any two ranks that hold a part (a collective call; `mine` is None where this one does not)."""
    device = local_shard(next(iter(parameters.values()))).device
    if mine is not None:
        highest, lowest = mine.clone(), -mine
    else:
        highest, lowest = (torch.full(shape, -torch.inf, device=device) for _ in range(2))
    for values in (highest, lowest):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float((highest + lowest).max())
