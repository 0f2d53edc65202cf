"""What autograd keeps of a layer and of the loss, and what their backward passes hold beside it, in bytes.

Symbols: u = e b s h bytes, one activation of a micro-batch; t tensor-parallel ranks; q = 1 / t with sequence parallelism,
else 1. Counted as the trainer's modules save (training/model.py, tensor_parallel.py), eager and compiled alike.
"""

from typing import NamedTuple

from training.logits_memory import loss_parts
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.workload import Workload

_PART = {"cpu": 1 << 18, "cuda": 1 << 26}  # logits that the eager loss turns into float32 at a time


class Layer(NamedTuple):
    """One layer and micro-batch on one rank."""

    unit: float
    """u: the residual stream, whole."""
    stream: float
    """q u: the residual stream as a rank has it."""
    saved: float
    """Kept from the forward to the backward pass."""
    again: float
    """Made again by the backward pass, beside what was saved."""
    casts: float
    """Weights in the type of the products, which autograd keeps where no data-parallel gather makes them."""
    work: float
    """Gradients of activations that the backward pass holds at once."""


class Loss(NamedTuple):
    """The loss of one micro-batch on a rank of the last stage."""

    parts: int
    """1: whole logits."""
    saved: float
    """Around the head: the last LayerNorm's input and output, and the head's weight in the type of the products."""
    logits: float
    """Logits, or in parts the gradients that exist after the forward pass."""
    work: float
    """Beside them, at the worst moment of the loss."""
    weight: int
    """Elements of the head's weight."""


def layer_bytes(workload: Workload, layout: Layout, machine: Machine) -> Layer:
    """What a layer takes."""
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    unit = float(element * tokens * model.n_embd)
    share = 1 / tensor if layout.sequence_parallel else 1.0
    stream = share * unit
    statistics = 16 * share * tokens  # mean and 1 / deviation of two LayerNorms, float32
    lse = 4 * model.n_head * tokens / tensor
    masks = attention = 0.0
    if model.dropout:
        mask = 1 if workload.compiled or machine.device != "cpu" else element
        masks = 2 * mask * share * tokens * model.n_embd
        if machine.device == "cpu":  # no fused attention with dropout there: softmax, mask and product, (s, s) each
            attention = 3.0 * element * model.n_head / tensor * tokens * model.seq_len
    narrow = 2 * unit + 2 * stream  # both LayerNorms' inputs; their outputs, which enter the split products whole
    everything = narrow + 12 * unit / tensor + lse + statistics + masks + attention
    casts = 0.0
    if element < 4 and layout.data == 1:
        casts = element * 12.0 * model.n_embd**2 / tensor
    saved, again = everything, 0.0
    if layout.recompute == "full":
        saved, again = stream, everything - stream + casts
        casts = 0.0
    elif layout.recompute == "selective":
        results = 2 * unit + (2 * stream if tensor > 1 else 0)  # of both c_proj; summed over ranks they are saved again
        saved = stream + results + 8 * unit / tensor + lse + attention
        again = everything - stream - 8 * unit / tensor - lse - attention + casts
        casts = 0.0
    work = stream + 4 * unit / tensor + (unit if share < 1 else 0)
    return Layer(unit, stream, saved, again, casts, work)


def loss_bytes(workload: Workload, layout: Layout, machine: Machine, share: Layer) -> Loss:
    """What the loss takes, after layers that take `share`."""
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    rows = padded_vocab_size(model.vocab_size, tensor) // tensor
    elements, weight = tokens * rows, rows * model.n_embd
    parts = loss_parts(workload.loss, elements * element, machine.memory if machine.device == "cuda" else None)
    logits = float(element * elements)
    narrow = element < 4
    cast = float(element * weight) if narrow and layout.data == 1 else 0.0
    turned = 0.0 if workload.compiled else 4.0 * min(elements // parts, _PART[machine.device]) * (1 + narrow)
    if parts == 1:
        gradients = share.unit + element * weight  # of the input and of the weight
        fused = logits if workload.compiled else 0.0  # the gradient of the logits, which eager mode writes over them
        work = max(turned, fused, gradients, gradients + 4 * weight - logits if cast else 0)
        return Loss(parts, share.stream + share.unit + cast, logits, work, weight)
    product = element * weight if narrow else 0
    work = max(logits / parts + max(turned, product), 4 * weight + product + share.unit)
    return Loss(parts, share.stream + share.unit, share.unit + 4 * weight, work, weight)
