"""The memory that a layout takes per GPU, in bytes."""

from training.planning.layout import Layout
from training.planning.machines import GIB, Machine
from training.planning.terms import Term
from training.planning.workload import Workload

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "communication", "context")
FEASIBLE, TIGHT = 0.80, 0.92  # shares of the memory: below the first a layout fits, from the second on it does not


def memory_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of the fullest GPU's peak within a step."""
    ranks = {0, 1 % layout.pipeline, layout.pipeline - 1}
    return max((_of_rank(workload, layout, machine, rank) for rank in sorted(ranks)), key=total)


def total(terms: list[Term]) -> float:
    """Bytes."""
    return sum(term.value for term in terms)


def _of_rank(workload: Workload, layout: Layout, machine: Machine, rank: int) -> list[Term]:
    held = workload.model.parameters / (layout.tensor * layout.pipeline)
    shared = held / (layout.data if layout.zero_stage else 1)
    return [
        Term("parameters", 4 * shared, "float32 parameters", "4 P / (t p d)"),
        Term("gradients", 4 * shared, "float32 gradients", "4 P / (t p d)"),
        Term("optimizer", 8 * shared, "AdamW's two moments", "8 P / (t p d)"),
        Term("context", 0.5 * GIB, "CUDA context", ""),
    ]
