"""The bytes that each GPU of a layout sends per step, by group of ranks and kind of link.

Tensor ranks are adjacent, then data ranks, then pipeline ranks. Collectives are rings: a sum of S
bytes over n ranks sends 2 (n - 1) / n S from each, a gather or a scatter half of that.
"""

from math import ceil, log2
from typing import NamedTuple

from training.planning.layout import Layout, Workload
from training.planning.machines import Machine
from training.planning.memory import Shards

_NODE = 0.80  # of the link inside a node, NCCL's protocol: 370 of 450 GB/s (nccl-tests#212)
_NETWORK = 0.60  # of the network: between 30 and 96 % of line rate is reported (nccl-tests#119, #152)
# Seconds of each of the log2(n) steps of a collective
_NODE_HOP = 6e-6  # small all-reduces on eight GPUs take about 40 us with their launch
_NETWORK_HOP = 15e-6  # one GPU on each of two nodes: 93 us for 2 MB at 50 GB/s (nccl-tests#232)


class Group(NamedTuple):
    """Ranks that communicate."""

    crosses: bool
    """Whether its ranks are on several nodes."""
    bandwidth: float
    """Bytes per second that one rank sends around the ring."""
    latency: float
    """Seconds of a gather or scatter without data; a sum takes twice as long."""


def group(machine: Machine, size: int, stride: int, world_size: int) -> Group:
    """The group of `size` ranks that are `stride` apart; a ring is as slow as its slowest link.

    `stride` such groups share the network of a node, which a group uses from each of its ranks
    there.
    """
    gpu, span = machine.gpu, size * stride
    crosses = size > 1 and world_size > machine.per_node and (span > machine.per_node or machine.per_node % span > 0)
    bandwidth, hop = _NODE * gpu.node_gb_per_s, _NODE_HOP
    if crosses:
        members = min(size, max(1, machine.per_node // stride))
        bandwidth, hop = min(bandwidth, _NETWORK * members * gpu.network_gb_per_s), _NETWORK_HOP
    return Group(crosses, bandwidth * 1e9, ceil(log2(size)) * hop)


def _neighbours(machine: Machine, size: int, world_size: int) -> Group:
    """Pipeline ranks, the farthest apart: each uses its own share of the network."""
    if size > 1 and world_size > machine.per_node:
        return Group(True, _NETWORK * machine.gpu.network_gb_per_s * 1e9, _NETWORK_HOP)
    return Group(False, _NODE * machine.gpu.node_gb_per_s * 1e9, _NODE_HOP)


class Traffic(NamedTuple):
    """The bytes that one GPU of a pipeline rank sends per step, and the groups that it sends to."""

    tensor_ranks: Group
    pipeline_ranks: Group
    data_ranks: Group
    tensor: float
    """Sums of activations."""
    pipeline: float
    """Activations and their gradients."""
    gathers: float
    """Parameters, gathered."""
    gradients: float
    """Gradients, scattered or summed."""

    @property
    def links(self) -> tuple[float, float]:
        """Bytes inside the node, and between nodes: all of a group that is on several nodes."""
        sent = (
            (self.tensor_ranks, self.tensor),
            (self.pipeline_ranks, self.pipeline),
            (self.data_ranks, self.gathers + self.gradients),
        )
        between = sum(size for members, size in sent if members.crosses)
        return sum(size for _, size in sent) - between, between


def traffic(workload: Workload, layout: Layout, machine: Machine, shards: Shards) -> Traffic:
    """The traffic of one GPU of the pipeline rank that holds `shards` (before ZeRO)."""
    tensor, data, count, world = layout.tensor, layout.data, layout.accumulation, layout.world_size
    gathers, scatters = rounds(layout)
    ring = shards.total * (data - 1) / data
    unit = float(workload.element * layout.micro_batch_size * workload.model.seq_len * workload.model.n_embd)
    stream = unit / tensor if layout.sequence_parallel else unit
    return Traffic(
        group(machine, tensor, 1, world),
        _neighbours(machine, layout.pipeline, world),
        group(machine, data, tensor, world),
        tensor=count * shards.layers * sums_per_layer(layout) * 2 * (tensor - 1) / tensor * unit,
        pipeline=2 * layout.virtual_stages * count * stream if layout.pipeline > 1 else 0.0,
        gathers=gathers * workload.element * ring,
        gradients=scatters * 4 * ring * (1 if layout.zero_stage else 2),
    )


def rounds(layout: Layout) -> tuple[int, int]:
    """Gathers of parameters and scatters of gradients per step; a pipeline scatters once."""
    if layout.data == 1:
        return 0, 0
    count, zero, alone = layout.accumulation, layout.zero_stage, layout.pipeline == 1
    return (0, 1, 1, 2 * count if alone else count)[zero], count if zero >= 2 and alone else 1


def sums_per_layer(layout: Layout) -> float:
    """Sums over tensor ranks per layer: two forward, two backward, and those of recompute.

    With sequence parallelism each is a gather and a scatter, and gathers are not kept.
    """
    sliced = layout.sequence_parallel
    return 4 + {"none": 0.0, "selective": 1.0 if sliced else 0.0, "full": 1.5 if sliced else 1.0}[layout.recompute]
