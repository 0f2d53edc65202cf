"""What the GPUs of a layout send per step, to whom, and by which link.

Tensor ranks are adjacent, then data ranks, then pipeline ranks. Collectives are rings: a sum of S bytes over n ranks
sends 2 (n - 1) / n S from each, a gather or a scatter half of that.
"""

from typing import NamedTuple

from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.rates import Group, group, neighbours
from training.planning.workload import Workload


class Links(NamedTuple):
    """Bytes that one GPU sends per step, by the link that they take."""

    in_node: float
    between_nodes: float


class Rank(NamedTuple):
    """A pipeline rank: the first or the last."""

    layers: int
    head: bool


class Traffic(NamedTuple):
    """What one GPU of a pipeline rank sends per step, in bytes, and the groups that it sends to."""

    tensor_ranks: Group
    pipeline_ranks: Group
    data_ranks: Group
    tensor: float
    """Sums of activations."""
    pipeline: float
    """Activations and their gradients."""
    tied: float
    """The tied embedding's gradient, between the first and the last pipeline rank."""
    gathers: float
    """Parameters."""
    gradients: float


def links(workload: Workload, layout: Layout, machine: Machine) -> Links:
    """What one GPU of the busiest pipeline rank sends per step.

    A group on several nodes counts as between nodes with all its bytes: so do the GPUs at the nodes' edges.
    """
    first, last = ranks(workload.model.n_layer, layout)
    sent = traffic(workload, layout, machine, first if first.layers > last.layers else last)
    by_group = (
        (sent.tensor_ranks, sent.tensor),
        (sent.pipeline_ranks, sent.pipeline + sent.tied),
        (sent.data_ranks, sent.gathers + sent.gradients),
    )
    between = sum(sent_bytes for members, sent_bytes in by_group if members.crosses)
    return Links(sum(sent_bytes for _, sent_bytes in by_group) - between, between)


def traffic(workload: Workload, layout: Layout, machine: Machine, rank: Rank) -> Traffic:
    """What a GPU of this pipeline rank sends."""
    model, world = workload.model, layout.world_size
    t, p, d, m, zero = layout.tensor, layout.pipeline, layout.data, layout.accumulation, layout.zero_stage
    ring = parameters(workload, layout, rank)[0] * (d - 1) / d
    gathers, scatters = rounds(layout)
    outside = 1 + rank.head if p == 1 else 1  # the embedding's sum, and that of the loss's gradient
    stage: float = workload.element * layout.micro_batch_size * model.seq_len * model.n_embd
    if layout.sequence_parallel:
        stage /= t
    embedding = padded_vocab_size(model.vocab_size, t) * model.n_embd / t
    return Traffic(
        group(machine, t, 1, world),
        neighbours(machine, p, world),
        group(machine, d, t, world),
        tensor=m * (sums_per_layer(layout) * rank.layers + outside) * sum_bytes(workload, layout),
        pipeline=2 * layout.virtual_stages * m * stage if p > 1 else 0.0,
        tied=4 * embedding / (d if zero else 1) if p > 1 else 0.0,
        gathers=gathers * workload.element * ring,
        gradients=scatters * 4 * ring * (2 if zero == 0 else 1),
    )


def ranks(n_layer: int, layout: Layout) -> tuple[Rank, Rank]:
    """The first and the last pipeline rank; equal without a pipeline."""
    p, stages = layout.pipeline, layout.stages
    if p == 1:
        return (whole := Rank(n_layer, True)), whole

    def held(rank: int) -> int:  # as training.parallel.stages.stage_layers, without its lists
        edges = range(rank, stages, p)
        return sum(-(-n_layer * (stage + 1) // stages) - -(-n_layer * stage // stages) for stage in edges)

    return Rank(held(0), False), Rank(held(p - 1), True)


def parameters(workload: Workload, layout: Layout, rank: Rank) -> tuple[float, float]:
    """Parameters of a GPU of this rank, and those of them outside layers."""
    model = workload.model
    outside = padded_vocab_size(model.vocab_size, layout.tensor) * model.n_embd / layout.tensor
    return rank.layers * model.layer_parameters / layout.tensor + outside, outside


def rounds(layout: Layout) -> tuple[int, int]:
    """How often a step gathers parameters and scatters gradients; PyTorch's pipelines scatter once, at their end."""
    if layout.data == 1:
        return 0, 0
    m, zero, alone = layout.accumulation, layout.zero_stage, layout.pipeline == 1
    gathers = (0, 1, 1, 2 * m if alone else m)[zero]
    return gathers, m if zero >= 2 and alone else 1


def sums_per_layer(layout: Layout) -> float:
    """Sums over tensor ranks per layer: two forward, two backward, and those of recompute.

    With sequence parallelism each is a gather and a scatter, and gathers are not kept.
    """
    sliced = layout.sequence_parallel
    return 4 + {"none": 0.0, "selective": 1.0 if sliced else 0.0, "full": 1.5 if sliced else 1.0}[layout.recompute]


def sum_bytes(workload: Workload, layout: Layout) -> float:
    """A sum of a micro-batch's activations over the tensor ranks."""
    t = layout.tensor
    return 2 * (t - 1) / t * workload.element * layout.micro_batch_size * workload.model.seq_len * workload.model.n_embd
