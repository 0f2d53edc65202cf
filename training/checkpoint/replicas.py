"""Checks that the ranks' copies of a parameter are still equal.

Tensor-parallel ranks hold copies of the LayerNorms, positions and output biases; data-parallel
ranks at ZeRO 0 of every parameter; the first and last pipeline stages of the tied embedding. All
copies get the same updates and stay equal bit for bit, unless a kernel is not deterministic or a
device is defective.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard, shard_region
from training.region import Region


@dataclass(frozen=True)
class Replicas:
    """The result of a comparison, equal on all ranks."""

    compared: list[str] = field(default_factory=list)
    """Parameters with at least one shard that several ranks hold."""
    drifted: dict[str, float] = field(default_factory=dict)
    """The largest difference between copies, by parameter."""

    def warning(self) -> str:
        """One line, empty if no parameter drifted."""
        if not self.drifted:
            return ""
        name, largest = next(iter(self.drifted.items()))
        return (
            f"{len(self.drifted)} of {len(self.compared)} parameters differ between ranks that hold copies of "
            f"them, {name} by up to {largest:g}; the checkpoint's manifest.json names all, and has one copy of each"
        )


def compare_replicas(parameters: Mapping[str, nn.Parameter]) -> Replicas:
    """Compare the copies of all parameters bit for bit (a collective call).

    A single process has no copies.
    """
    if not dist.is_initialized():
        return Replicas()
    shards = {
        (name, shard_region(parameter)): local_shard(parameter.detach()) for name, parameter in parameters.items()
    }
    holders = Counter(shard for held in all_gather([shard for shard in shards if shard[1].size]) for shard in held)
    digests: dict[tuple[str, Region], set[bytes]] = {}
    mine = {  # one CPU copy exists at a time
        shard: xxhash.xxh3_128_digest(tensor.cpu().contiguous().numpy().data)
        for shard, tensor in shards.items()
        if holders[shard] > 1
    }
    for of_rank in all_gather(mine):
        for shard, digest in of_rank.items():
            digests.setdefault(shard, set()).add(digest)
    drifted: dict[str, float] = {}
    for shard in sorted(shard for shard, distinct in digests.items() if len(distinct) > 1):
        name, region = shard
        difference = _largest_difference(shards.get(shard), region, parameters)
        drifted[name] = max(difference, drifted.get(name, 0.0))
    return Replicas(sorted({name for name, _ in digests}), drifted)


def _largest_difference(mine: Tensor | None, region: Region, parameters: Mapping[str, Tensor]) -> float:
    """The largest difference between the copies of a shard (a collective call).

    `mine` is this rank's copy, or None.
    """
    if mine is not None:
        highest, lowest = mine.clone(), -mine
    else:
        device = local_shard(next(iter(parameters.values()))).device
        highest, lowest = (torch.full(region.shape, -torch.inf, device=device) for _ in range(2))
    for values in (highest, lowest):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float((highest + lowest).max())
