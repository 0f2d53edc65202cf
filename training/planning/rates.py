"""What devices and links reach of their peaks: the constants of the speed model, each with its reason.

Two are calibrated on published runs (`products`, `vector_operations`); the others come from measurements that their
comments name. `python -m benchmarks.planning` shows the errors that remain.
"""

from math import ceil, log2
from typing import NamedTuple

from training.planning.machines import Machine


class Rates(NamedTuple):
    """Shares of peaks, and times in seconds."""

    products: float
    """Of the peak, by a matrix product so long that moving its matrices costs nothing."""
    bandwidth: float
    """Of the memory's bandwidth, by kernels that only move bytes."""
    node: float
    """Of the link inside a node, by collectives."""
    network: float
    """Of the network, by collectives."""
    start: float
    """Each kernel: launch, filling and draining the device."""
    node_hop: float
    """Each of the log2(n) steps of a collective inside a node."""
    network_hop: float
    """The same between nodes."""
    hidden: float
    """The share of communication that costs time although computation hides it; 1: nothing is hidden."""
    vector_operations: float
    """Float32 operations per attention score beside the products, forward and backward."""
    dropout_operations: float
    """The same for drawing the mask of a score twice."""
    eager_layer: float
    """Host: launching a layer forward and backward, operation by operation."""
    compiled_layer: float
    """Host: the same compiled."""
    parallel_layer: float
    """Host: collectives and hooks of a layer, for each of tensor and data parallelism."""
    micro_batch: float
    """Host: embedding, loss and schedule of a micro-batch."""
    step: float
    """Host: what a step does once, with the device idle: reading loss and norm back, clipping, logging."""


GPU = Rates(
    products=0.77,  # alone 770 to 800 of 989 TFLOP/s on an H200; less in a step, whose load lowers clocks: calibrated
    bandwidth=0.82,  # copies reach .9 on an H200 (4.3 of 4.8 TB/s), kernels with sums over rows less
    node=0.80,  # NCCL's protocol: 370 of 450 GB/s (nccl-tests#212)
    network=0.60,  # between 30 and 96 % of line rate is reported (nccl-tests#119, #152)
    start=4e-6,
    node_hop=6e-6,  # small all-reduces on eight GPUs take about 40 us with their launch
    network_hop=15e-6,  # one GPU on each of two nodes: 93 us for 2 MB at 50 GB/s (nccl-tests#232)
    hidden=0.1,  # NCCL takes some of the multiprocessors and of the memory's bandwidth
    vector_operations=100.0,  # between FlashAttention-2 on A100 and cuDNN on H100
    dropout_operations=40.0,  # Philox: 60 instructions per eight numbers, and the mask, twice
    eager_layer=500e-6,  # 90 launches at 5 to 6 us
    compiled_layer=200e-6,
    parallel_layer=100e-6,
    micro_batch=500e-6,
    step=3e-3,
)

CPU = Rates(
    products=0.70,  # a whole training step then reaches .6 of the measured rate; .55 to .76 were measured
    bandwidth=1.0,
    node=1.0,
    network=1.0,
    start=0.0,
    node_hop=50e-6,
    network_hop=100e-6,
    hidden=1.0,  # the same cores compute and communicate
    vector_operations=100.0,
    dropout_operations=40.0,
    eager_layer=600e-6,
    compiled_layer=300e-6,
    parallel_layer=200e-6,
    micro_batch=1e-3,
    step=5e-3,
)


def rates_of(machine: Machine) -> Rates:
    """The constants of a machine's kind of device."""
    return CPU if machine.device == "cpu" else GPU


class Group(NamedTuple):
    """Ranks that communicate: `stride` apart in the order of ranks."""

    size: int
    crosses: bool
    """Whether the group has ranks on several nodes."""
    bandwidth: float
    """Bytes per second that one rank sends around the ring."""
    latency: float
    """Seconds of a collective without data: a gather or a scatter; a sum takes two."""


def group(machine: Machine, size: int, stride: int, world_size: int) -> Group:
    """The group of `size` ranks, each `stride` after the one before. A ring is as slow as its slowest link.

    A node's ranks of the group share what those of `stride` groups leave of its network.
    """
    gpu, rates, span = machine.gpu, rates_of(machine), size * stride
    crosses = size > 1 and world_size > machine.per_node and (span > machine.per_node or machine.per_node % span > 0)
    bandwidth, hop = rates.node * gpu.node_gb_per_s, rates.node_hop
    if crosses:
        shares = min(size, max(1, machine.per_node // stride))
        bandwidth, hop = min(bandwidth, rates.network * shares * gpu.network_gb_per_s), rates.network_hop
    return Group(size, crosses, bandwidth * 1e9, ceil(log2(size)) * hop if size > 1 else 0.0)


def neighbours(machine: Machine, size: int, world_size: int) -> Group:
    """Pipeline ranks, which are the farthest apart: each sends to the next by its own share of the network."""
    gpu, rates = machine.gpu, rates_of(machine)
    if size > 1 and world_size > machine.per_node:
        return Group(size, True, rates.network * gpu.network_gb_per_s * 1e9, rates.network_hop)
    return Group(size, False, rates.node * gpu.node_gb_per_s * 1e9, rates.node_hop)
