"""The memory that a layout takes per GPU, in bytes.

    terms = memory_terms(workload, layout, machine)
    total(terms) < FEASIBLE * machine.memory

The terms are those of the fullest GPU at its worst moment of a step (training/planning/moments.py), and what PyTorch,
CUDA and NCCL take beside it. tests/training/planning compares them with the trainer's steps.
"""

from training.planning.layout import Layout
from training.planning.machines import GIB, Machine
from training.planning.moments import Case, Fixed, Moment, size, worst_moment
from training.planning.terms import Term
from training.planning.workload import Workload

MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "communication", "context")
FEASIBLE, TIGHT = 0.80, 0.92  # shares of the memory: below the first a layout fits, from the second on it does not

CUDA_CONTEXT = 0.5 * GIB  # driver and loaded kernels
CUBLAS_WORKSPACE = 32 * MIB  # PyTorch's on Hopper; 8 MiB before
COMMUNICATOR = 0.2 * GIB  # NCCL's channels, per axis with more than one rank
FRAGMENTATION = 0.03  # of what PyTorch's allocator hands out, with expandable segments
CPU_FRAGMENTATION = 0.25  # of what is allocated: glibc keeps freed memory
PYTHON = 0.35 * GIB  # a process with torch loaded, and no GPU
UNPROVEN = "an estimate until a GPU has been measured"


def memory_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of the fullest GPU's peak within a step."""
    case = Case.of(workload, layout, machine)
    # rank 0 keeps the most micro-batches and the embedding, the last one has the head, the others have more buffers
    found = max((worst_moment(case, rank) for rank in {0, 1 % layout.pipeline, layout.pipeline - 1}), key=size)
    return _terms(case, machine, *found)


def rank_terms(workload: Workload, layout: Layout, machine: Machine, rank: int) -> list[Term]:
    """The terms of one pipeline rank's peak."""
    case = Case.of(workload, layout, machine)
    return _terms(case, machine, *worst_moment(case, rank))


def total(terms: list[Term]) -> float:
    """Bytes."""
    return sum(term.value for term in terms)


_ZERO, _PLAIN = "Rajbhandari et al. 2020, section 5", ""
_NAMES = {  # key of Fixed or Moment: part, name, formula, source
    "parameters": ("parameters", "float32 parameters", "4 P / (t p), from ZeRO 1 on / d", _ZERO),
    "moments": ("optimizer", "AdamW's two moments", "8 P / (t p), from ZeRO 1 on / d", _ZERO),
    "gradients": ("gradients", "summed gradients, float32", "4 P / (t p), sharded / d once reduced", _ZERO),
    "fresh": ("gradients", "gradients in the making", "of a layer; of the tied embedding, up to three", _PLAIN),
    "again": ("activations", "one layer's activations, computed again", "what recompute did not keep", _PLAIN),
    "work": ("activations", "gradients of activations", "(q + 4 / t) u, with sequence parallelism + u", _PLAIN),
    "logits": ("logits and loss", "logits", "e b s V / t; in parts u + 4 V h / t", _PLAIN),
    "loss": ("logits and loss", "beside the logits", "gradients of logits, input and head", _PLAIN),
    "gathered": ("communication", "gathered parameters", "e P / (t p); ZeRO 3: embeddings, two layers", _ZERO),
    "reduced": ("communication", "gradients being reduced", "4 P of one layer or of the embeddings", _PLAIN),
    "buffers": ("communication", "what a pipeline receives", "m q u per neighbouring stage", _PLAIN),
}
_KEPT = {  # by recompute, and whether compiled
    ("none", False): "k L ((2 + 2 q + 12 / t) u + masks + casts)",
    ("none", True): "k L ((2 + 2 q + 12 / t) u + masks + casts)",
    ("selective", False): "k L (2 + q + 8 / t) u, with tensor ranks + 2 q u",
    ("selective", True): "k L (2 q + 8 / t) u",
    ("full", False): "k L q u",
    ("full", True): "k L q u",
}
_OURS = "Korthikanti et al. 2022, section 4; ours keeps the inputs of split products whole, and casts of the weights"


def _terms(case: Case, machine: Machine, fixed: Fixed, moment: Moment) -> list[Term]:
    """The terms of a rank at a moment."""
    workload, layout = case.workload, case.layout
    sizes = {**fixed._asdict(), **moment._asdict()}
    terms = [
        Term(part, sizes[key], name, formula, source)
        for key, (part, name, formula, source) in _NAMES.items()
        if sizes[key]
    ]
    kept = _KEPT[layout.recompute, workload.compiled]
    terms.append(Term("activations", moment.saved, "kept from forward to backward", kept, _OURS))
    axes = (layout.tensor > 1) + (layout.data > 1) + (layout.pipeline > 1)
    batches = 32.0 * layout.micro_batch_size * workload.model.seq_len * layout.accumulation
    terms.append(Term("activations", batches, "token ids and targets of this step and the next", "2 x 16 b s m"))
    allocated = size((fixed, moment)) + batches
    if machine.device == "cpu":
        gaps = CPU_FRAGMENTATION * allocated
        terms.append(Term("context", PYTHON, "Python and PyTorch", "0.35 GiB", "measured: docs/planning.md"))
        terms.append(Term("context", gaps, "allocator: what glibc keeps", "25 % of what is allocated", "measured, too"))
        return terms
    if axes:
        nccl = axes * COMMUNICATOR
        terms.append(Term("communication", nccl, "NCCL's buffers", "0.2 GiB per axis with several ranks", UNPROVEN))
    gaps = FRAGMENTATION * allocated
    terms.append(Term("context", CUDA_CONTEXT, "CUDA context", "0.5 GiB", UNPROVEN))
    terms.append(Term("context", CUBLAS_WORKSPACE, "cuBLAS's workspace", "32 MiB", "PyTorch: CUBLAS_WORKSPACE_CONFIG"))
    terms.append(Term("context", gaps, "allocator: rounding and gaps", "3 % of what is allocated", UNPROVEN))
    return terms
