"""What autograd keeps of a layer and of the loss, and what their backward passes hold beside it, in bytes.

Symbols: u = e b s h bytes, one activation of a micro-batch; t tensor-parallel ranks; q = 1 / t with sequence
parallelism, else 1. Counted as the trainer's modules save; tests/training/planning/test_memory.py compares this
with autograd.
"""

from typing import NamedTuple

from training.logits_memory import loss_parts
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.workload import Workload

# logits that the eager loss turns into float32 at a time (training/kernels/cross_entropy.py)
TURNED = {"cpu": 1 << 18, "cuda": 1 << 26}


class Layer(NamedTuple):
    """One layer and micro-batch on one rank."""

    unit: float
    """u: the residual stream, whole."""
    stream: float
    """q u: the residual stream as a rank has it."""
    saved: float
    """Kept from the forward to the backward pass, without casts."""
    casts: float
    """Weights in the type of the products, which autograd keeps where no data-parallel gather makes them."""
    again: float
    """Made again by the backward pass, beside what was saved."""
    work: float
    """Gradients of activations that the backward pass holds at once."""
    mask: float
    """One dropout mask of the residual stream."""


class Loss(NamedTuple):
    """The loss of one micro-batch on a rank of the last stage."""

    parts: int
    """1: whole logits."""
    saved: float
    """Before the logits: the last LayerNorm's input and output, and the head's weight in the type of the products."""
    logits: float
    """Logits; in parts, the gradients that exist after the forward pass."""
    work: float
    """Beside them, at the worst moment of the loss."""
    weight: int
    """Elements of the head's weight."""


def layer_bytes(workload: Workload, layout: Layout, machine: Machine) -> Layer:
    """What a layer takes."""
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    unit = float(element * tokens * model.n_embd)
    stream = unit / tensor if layout.sequence_parallel else unit
    on_cpu = machine.device == "cpu"
    mask = 0.0
    if model.dropout:  # a byte per element; eager mode on a CPU multiplies with one in the activations' type
        mask = stream if on_cpu and not workload.compiled else stream / element

    attention, kept, scores = _attention(workload, layout, on_cpu, unit)
    statistics = 16 * tokens * stream / unit  # mean and 1 / deviation of two LayerNorms, float32
    # both LayerNorms' inputs, and their outputs, which enter the split products whole; fc and gelu
    everything = 2 * stream + 2 * unit + 8 * unit / tensor + attention + statistics + 2 * mask
    casts = element * 12.0 * model.n_embd**2 / tensor if element < 4 and layout.data == 1 else 0.0

    # with sequence parallelism one is gathered; unfused attention has float32 gradients of weights and scores
    work = max(stream + 4 * unit / tensor + (unit if stream < unit else 0), stream + 8 * scores)
    if layout.recompute == "none":
        return Layer(unit, stream, everything, casts, 0.0, work, mask)
    saved = stream
    if layout.recompute == "selective":
        # both projections, and with several ranks before and after their sum; compiled, only attention's sum
        eager = 2 * unit + (2 * stream if tensor > 1 else 0)
        saved += (stream if workload.compiled else eager) + 4 * unit / tensor + kept
    return Layer(unit, stream, saved, 0.0, everything - min(saved, everything) + casts, work, mask)


def _attention(workload: Workload, layout: Layout, on_cpu: bool, unit: float) -> tuple[float, float, float]:
    """What attention saves, what selective recompute keeps of that, and the elements of its weights if they exist."""
    model, tensor = workload.model, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    if not (on_cpu and model.dropout):
        fused = 4 * unit / tensor + 4 * model.n_head * tokens / tensor  # q, k, v, the result, float32 log-sum-exp
        return fused, fused, 0.0
    # a CPU has no fused kernel with dropout: weights, mask and their product, (s, s) per head
    scores = float(model.n_head // tensor * tokens * model.seq_len)
    if tensor > 1 and not layout.sequence_parallel:
        found = (5 + workload.element) * scores  # training/parallel/randomness.py: float32, bool, the product
    else:
        found = 12 * scores + (3 * unit / tensor if workload.element < 4 else 0)  # in float32, with q, k and v
    return found + 4 * unit / tensor, 3 * unit / tensor, scores


def loss_bytes(workload: Workload, layout: Layout, machine: Machine, layer: Layer) -> Loss:
    """What the loss takes, after layers that take `layer`."""
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    rows = padded_vocab_size(model.vocab_size, tensor) // tensor
    elements, weight = tokens * rows, rows * model.n_embd
    parts = loss_parts(workload.loss, elements * element, machine.memory if machine.device == "cuda" else None)
    logits, narrow = float(element * elements), element < 4
    cast = float(element * weight) if narrow and layout.data == 1 else 0.0
    saved = layer.stream + layer.unit + cast
    turned = 0.0 if workload.compiled else 4.0 * min(elements // parts, TURNED[machine.device]) * (1 + narrow)
    if parts > 1:
        product = element * weight if narrow else 0
        work = max(logits / parts + max(turned, product), 4 * weight + product + layer.unit)
        return Loss(parts, saved - cast, layer.unit + 4 * weight, work, weight)
    of_both = layer.unit + element * weight  # the gradients of the input and of the weight
    work = max(turned, of_both, of_both + 4 * weight - logits if cast else 0)
    if not workload.compiled:
        return Loss(parts, saved, logits, work, weight)  # the gradient overwrites the logits
    work = max(work, logits)
    # over several ranks the compiler keeps float32 logits and the mask of the targets
    return Loss(parts, saved, 5.0 * elements if tensor > 1 else logits, work, weight)
