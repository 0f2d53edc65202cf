"""Where the work of a layout lies under the roofline of its GPU (Williams et al. 2009)."""

from typing import NamedTuple

from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.workload import Workload


class Work(NamedTuple):
    """One kind of work of the forward pass of a micro-batch in one layer, or of one step of the optimizer."""

    name: str
    operations: float
    """Floating-point operations."""
    moved: float
    """Bytes read from and written to the GPU's memory."""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.moved

    def attainable(self, machine: Machine, precision: str) -> float:
        """FLOP/s under the roof: the peak, or what the memory's bandwidth feeds."""
        return min(machine.peak_flops(precision), self.intensity * 1e9 * machine.gpu.memory_gb_per_s)


def work_of(workload: Workload, layout: Layout) -> list[Work]:
    """The kinds of work on one GPU; what each reads and writes is counted once, as a fused kernel does."""
    model, element = workload.model, workload.element
    width, ranks = model.n_embd, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    rows = padded_vocab_size(model.vocab_size, ranks) // ranks
    matrices = 12 * width**2 / ranks  # c_attn, c_proj and the MLP
    between = (4 + 12 / ranks) * tokens * width  # their inputs and outputs
    split = ranks if layout.sequence_parallel else 1
    stream, inner = tokens * width / split, 4 * tokens * width / ranks  # the residual stream; inside the MLP
    held = model.parameters / (ranks * layout.pipeline * (layout.data if layout.zero_stage else 1))
    return [
        Work("matrix products", 2 * tokens * matrices, element * (matrices + between)),
        Work("attention", 4 * tokens * model.seq_len * width / ranks, element * 4 * tokens * width / ranks),
        # two LayerNorms of 8 operations per number, two residuals with dropout of 3; GELU of 10
        Work("LayerNorm, residual, GELU", 22 * stream + 10 * inner, element * (10 * stream + 2 * inner)),
        Work("head and loss", 2 * tokens * width * rows, element * (tokens * width + rows * width + 2 * tokens * rows)),
        Work("optimizer", 14 * held, 28 * held),  # float32: parameter, gradient and two moments read, three written
    ]
