"""The time of one optimiser step in a layout, in seconds."""

from typing import NamedTuple

from training.planning.flops import flops_per_token
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.terms import Term
from training.planning.workload import Workload


class Links(NamedTuple):
    """Bytes that one GPU sends per step, by the link that they take."""

    in_node: float
    between_nodes: float


def speed_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of a step's time that are not hidden behind each other; their sum is the time of the step."""
    tokens = layout.global_batch_size * workload.model.seq_len
    work = flops_per_token(workload.model) * tokens / layout.world_size
    return [Term("matrix products", work / (0.5 * machine.peak_flops(workload.precision)), "all of them", "F / R")]


def links(workload: Workload, layout: Layout, machine: Machine) -> Links:
    """What one GPU of the busiest pipeline rank sends per step."""
    return Links(0.0, 0.0)
