"""The memory that a layout takes per GPU, in bytes.

    terms = memory_terms(workload, layout, machine)
    total(terms) < FEASIBLE * machine.memory

A rank's memory peaks at one of a few moments of a step: in the loss, in the backward pass of its last or of its first
layer, in that of the embedding, when data-parallel ranks exchange gradients, or when the optimiser steps. Each moment is
a sum of the same terms; the largest sum is the prediction. tests/training/planning compares it with the trainer's steps.
"""

from typing import NamedTuple

from training.planning.activations import Layer, Loss, layer_bytes, loss_bytes
from training.planning.layout import Layout
from training.planning.machines import GIB, Machine
from training.planning.shards import Held, held
from training.planning.terms import Term
from training.planning.workload import Workload

MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "communication", "context")
FEASIBLE, TIGHT = 0.80, 0.92  # shares of the memory: below the first a layout fits, from the second on it does not

CUDA_CONTEXT = 0.5 * GIB  # driver and loaded kernels
CUBLAS_WORKSPACE = 32 * MIB  # PyTorch's on Hopper; 8 MiB before
COMMUNICATOR = 0.2 * GIB  # NCCL's channels, per axis with more than one rank
FRAGMENTATION = 0.03  # of what PyTorch's allocator hands out, with expandable segments
PYTHON = 0.35 * GIB  # a process with torch loaded, and no GPU
UNPROVEN = "an estimate until a GPU has been measured"


def memory_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of the fullest GPU's peak within a step."""
    shared = _Shared.of(workload, layout, machine)
    # rank 0 keeps the most micro-batches and the embedding, the last one has the head, the others have more buffers
    found = max((_peak(shared, rank) for rank in {0, 1 % layout.pipeline, layout.pipeline - 1}), key=_size)
    return _terms(shared, *found)


def rank_terms(workload: Workload, layout: Layout, machine: Machine, rank: int) -> list[Term]:
    """The terms of one pipeline rank's peak."""
    shared = _Shared.of(workload, layout, machine)
    return _terms(shared, *_peak(shared, rank))


def total(terms: list[Term]) -> float:
    """Bytes."""
    return sum(term.value for term in terms)


def in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at once; with several stages, a sum of their shares."""
    pipeline, stages, count = layout.pipeline, layout.virtual_stages, layout.accumulation
    if pipeline == 1:
        return 1
    if layout.schedule == "gpipe":
        return count
    if stages == 1:
        return min(count, pipeline - rank)
    per_round = count // max(1, count // pipeline)  # PyTorch's rounds
    passes = (stages - 1) * per_round + 2 * (pipeline - 1 - rank) + 1  # each of one stage
    return min(count * stages, passes) / stages


class _Shared(NamedTuple):
    """What all pipeline ranks have in common."""

    workload: Workload
    layout: Layout
    machine: Machine
    layer: Layer
    loss: Loss

    @classmethod
    def of(cls, workload: Workload, layout: Layout, machine: Machine) -> "_Shared":
        layer = layer_bytes(workload, layout, machine)
        return cls(workload, layout, machine, layer, loss_bytes(workload, layout, machine, layer))


class _Fixed(NamedTuple):
    """Held during the whole step."""

    parameters: float
    moments: float
    buffers: float


class _Moment(NamedTuple):
    """Held at one moment, beside what is fixed."""

    gradients: float
    fresh: float = 0.0
    saved: float = 0.0
    again: float = 0.0
    work: float = 0.0
    logits: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0


def _size(found: tuple[_Fixed, _Moment]) -> float:
    return sum(found[0]) + sum(found[1])


def _peak(shared: _Shared, rank: int) -> tuple[_Fixed, _Moment]:
    """What a pipeline rank holds at its worst moment."""
    workload, layout, _, layer, _ = shared
    model, pipeline, stages = workload.model, layout.pipeline, layout.virtual_stages
    whole = held(model, layout, rank)
    mine = held(model, layout, rank, layout.data) if layout.zero_stage else whole
    ends = 2 if pipeline == 1 else (rank == 0) + (rank == pipeline - 1)
    sent = 2 * stages - ends if pipeline > 1 else 0
    resident = 0 if layout.offload else mine.total
    fixed = _Fixed(4.0 * resident, 8.0 * resident, layout.accumulation * layer.stream * sent)
    return fixed, max(_moments(shared, rank, whole, mine), key=sum)


def _moments(shared: _Shared, rank: int, whole: Held, mine: Held) -> list[_Moment]:
    """The moments of a step at which a pipeline rank's memory may peak."""
    workload, layout, _, layer, loss = shared
    data, zero, count = layout.data > 1, layout.zero_stage, layout.accumulation
    pipeline, stages, element = layout.pipeline, layout.virtual_stages, workload.element
    first, last = rank == 0, rank == pipeline - 1
    reduces = data and pipeline == 1  # within the backward pass of the last micro-batch, or of each from ZeRO 2 on
    early = reduces and zero >= 2
    kind = element if data else 4  # bytes of a gradient that autograd gives: of the gathered copy, or of the parameter
    wte = loss.weight
    shards = 0 if layout.offload else 4  # bytes per element of a sharded gradient
    one = layer.saved + layer.casts  # a layer's and micro-batch's
    gathered = float(element * whole.root) if data else 0.0
    all_gathered = float(element * whole.total) if data else 0.0
    two_layers = gathered + element * whole.layer * min(2, whole.layers) if data else 0.0

    # with the gradients of the micro-batches before, and without them while all micro-batches are in flight
    kept = in_flight(layout, rank)
    before = float(shards * mine.total if early else 4 * whole.total)
    phases = [(before, kept)] if count > kept else [(0.0, kept)]
    if 1 < count <= kept:
        phases.append((before, kept - 1))
    waiting = 4.0 * whole.root if early and count > 1 else 0.0  # a reduced group's buffer, until the next is reduced

    moments = []
    for gradients, flying in phases:
        activations = flying * (whole.layers * one + (layer.mask / stages if first else 0))
        if pipeline > 1:  # outputs are kept until the end; the inputs of stages lie in buffers, or are such outputs
            activations += flying * layer.stream * (first - last) / stages
        heads = flying / stages if layout.schedule == "gpipe" else 1.0
        others = (heads - 1) * (loss.saved + loss.logits) if last else 0.0
        head = float(kind * wte) if last else 0.0  # the tied head's gradient waits for the embedding's
        if last:
            moments.append(
                _Moment(
                    gradients,
                    saved=activations + heads * loss.saved,
                    logits=heads * loss.logits,
                    loss=loss.work,
                    gathered=_while_loss(layout, whole, gathered, all_gathered, element),
                    reduced=waiting,
                )
            )
        # the last layer, from which the backward pass starts; if it reduces, the one below it
        matrix = whole.layer / 3  # the largest of four
        if reduces:
            fresh, reduced = element * whole.layer, max(waiting, 4 * whole.layer + shards * mine.layer - one)
        else:
            fresh, reduced = matrix * (element + 4 if gradients and element < 4 else 4), 0.0
        moments.append(
            _Moment(
                gradients,
                head + fresh,
                activations + others,
                layer.again,
                layer.work,
                gathered=all_gathered if zero < 3 else two_layers,
                reduced=reduced,
            )
        )
        # the first layer: its own activations are left, and those of other micro-batches
        rest = activations - (whole.layers / stages - 1) * one + others
        done = shards * mine.layer * (whole.layers - 1) if reduces else 4.0 * whole.layer * whole.layers
        summed = 4.0 * whole.root if reduces and gradients and not early else 0.0  # whole sums not yet reduced
        moments.append(
            _Moment(
                max(gradients if early or not reduces or not zero else 0.0, done + summed),
                head + (element * whole.layer if reduces else 0.0),
                rest,
                layer.again,
                layer.work,
                gathered=gathered + element * whole.layer if reduces else all_gathered,
                reduced=4.0 * whole.layer if reduces and whole.layers > 1 else 0.0,
            )
        )
        # the embedding
        if first:
            done = shards * mine.layer * whole.layers if reduces else 4.0 * (whole.total if data and element < 4 else whole.layer * whole.layers)
            looked_up = kind * (wte + workload.model.seq_len * workload.model.n_embd)
            both = head + looked_up + head  # and their sum
            fresh, reduced = both, 4.0 * whole.layer if reduces else 0.0
            if reduces and count > 1 and zero in (1, 2):  # of a micro-batch before the last: all are still gathered
                sums = before if early else before - 4.0 * whole.root * (count == 2)
                moments.append(_Moment(sums, both, work=layer.stream, gathered=all_gathered, reduced=reduced * early))
            if reduces and (4 + element) * whole.root > fresh + reduced:
                fresh, reduced = float(element * whole.root), 4.0 * whole.root
            moments.append(
                _Moment(
                    max(gradients if early or not reduces or not zero else 0.0, done + summed),
                    fresh,
                    max(0.0, rest - one),
                    work=layer.stream,
                    gathered=gathered if reduces else all_gathered,
                    reduced=reduced,
                )
            )
    if data and not reduces:  # after all backward passes, group by group
        group = whole.root or whole.layer  # its gathered copy is freed first
        moments.append(_Moment(4.0 * whole.total, gathered=all_gathered - element * group, reduced=4.0 * group))
    exchanged = 4.0 * wte / (layout.data if zero else 1) if pipeline > 1 and (first or last) else 0.0
    moments.append(_Moment(float(shards * mine.total), reduced=exchanged))
    return moments


def _while_loss(layout: Layout, whole: Held, root: float, everything: float, element: int) -> float:
    """Gathered parameters while the loss is computed."""
    if layout.data == 1:
        return 0.0
    arriving = element * whole.layer if layout.zero_stage and (layout.accumulation == 1 or layout.zero_stage == 3) else 0
    return (everything if layout.zero_stage < 3 else root) + arriving


def _terms(shared: _Shared, fixed: _Fixed, moment: _Moment) -> list[Term]:
    return []
