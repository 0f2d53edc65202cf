"""What a pipeline rank holds at the moments of a step at which its memory may peak, in bytes.

Which moment is the worst depends on the layout: activations shrink during the backward pass while gradients grow.

FSDP2's part (torch.distributed.fsdp): ZeRO 0 to 2 keep the gathered copies of a step, ZeRO 3 the embeddings and two
layers. To be reduced, a group's gradients are copied into a float32 buffer, which is held until the next group's turn.
"""

from typing import NamedTuple, Self

from training.planning.activations import Layer, Loss, layer_bytes, loss_bytes
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.shards import Held, held
from training.planning.workload import Workload


class Fixed(NamedTuple):
    """Held during the whole step."""

    parameters: float
    moments: float
    buffers: float
    """Into which a pipeline receives; PyTorch makes one per micro-batch."""


class Moment(NamedTuple):
    """Held at one moment, beside what is fixed."""

    gradients: float
    """Sums, float32."""
    fresh: float = 0.0
    """Gradients of parameters that the backward pass is making."""
    saved: float = 0.0
    again: float = 0.0
    work: float = 0.0
    logits: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0


def size(found: tuple[Fixed, Moment]) -> float:
    """Bytes."""
    return sum(found[0]) + sum(found[1])


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


class Case(NamedTuple):
    """What all pipeline ranks have in common."""

    workload: Workload
    layout: Layout
    layer: Layer
    loss: Loss

    @classmethod
    def of(cls, workload: Workload, layout: Layout, machine: Machine) -> Self:
        """What a layout takes per layer and in the loss."""
        layer = layer_bytes(workload, layout, machine)
        return cls(workload, layout, layer, loss_bytes(workload, layout, machine, layer))


class _Rank(NamedTuple):
    """A pipeline rank."""

    case: Case
    whole: Held
    """Elements that it computes with."""
    mine: Held
    """Those that it keeps."""
    first: bool
    last: bool
    reduces: bool
    """Gradients are reduced layer by layer within a backward pass; pipelines do it at the end."""
    early: bool
    """After every micro-batch: ZeRO 2 and 3."""
    fresh: int
    """Bytes per element of a new gradient: it has the type of the gathered copy, else that of the parameter."""
    kept: int
    """Bytes per element of a summed and sharded gradient: none if it goes to the CPU's memory."""
    root: float
    """The embeddings, gathered."""
    everything: float
    """All parameters, gathered."""
    head: float
    """The gradient of the tied head, which waits for that of the embedding."""
    before: float
    """Gradients of the micro-batches before."""


def worst_moment(case: Case, rank: int) -> tuple[Fixed, Moment]:
    """What a pipeline rank holds at its worst moment."""
    workload, layout, layer, loss = case
    pipeline, zero, data = layout.pipeline, layout.zero_stage, layout.data > 1
    whole = held(workload.model, layout, rank)
    mine = held(workload.model, layout, rank, layout.data) if zero else whole
    first, last = rank == 0, rank == pipeline - 1
    reduces = data and pipeline == 1
    fresh, kept = workload.element if data else 4, 0 if layout.offload else 4
    found = _Rank(
        case,
        whole,
        mine,
        first,
        last,
        reduces,
        reduces and zero >= 2,
        fresh,
        kept,
        float(fresh * whole.root) if data else 0.0,
        float(fresh * whole.total) if data else 0.0,
        float(fresh * loss.weight) if last else 0.0,
        float(kept * mine.total if reduces and zero >= 2 else 4 * whole.total),
    )
    neighbours = 2 * layout.virtual_stages - first - last if pipeline > 1 else 0
    resident = 0.0 if layout.offload else 4.0 * mine.total
    fixed = Fixed(resident, 2 * resident, layout.accumulation * layer.stream * neighbours)
    return fixed, max(_moments(found, in_flight(layout, rank)), key=sum)


def _moments(rank: _Rank, flying: float) -> list[Moment]:
    """The moments of a step; `flying` micro-batches are in flight at most."""
    (_, layout, layer, loss), count = rank.case, rank.case.layout.accumulation
    one = layer.saved + layer.casts
    # the sums of micro-batches before this one: none while all of them are in flight
    phases = [(rank.before, flying)] if count > flying else [(0.0, flying)]
    if 1 < count <= flying:
        phases.append((rank.before, flying - 1))
    moments = _between_micro_batches(rank)
    for before, flying in phases:
        saved = flying * (rank.whole.layers * one + (layer.mask / layout.virtual_stages if rank.first else 0))
        if layout.pipeline > 1:  # outputs are kept until the end; inputs lie in the buffers, or are such outputs
            saved += flying * layer.stream * (rank.first - rank.last) / layout.virtual_stages
        if rank.last:
            ends = flying if layout.schedule == "gpipe" else 1.0
            moments.append(_in_loss(rank, before, saved, ends))
            saved += (ends - 1) * (loss.saved + loss.logits)
        moments.append(_in_last_layer(rank, before, saved))
        saved -= (rank.whole.layers / layout.virtual_stages - 1) * one
        moments.append(_in_first_layer(rank, before, saved))
        if rank.first:
            moments.append(_in_embedding(rank, before, max(0.0, saved - one)))
    return moments


def _in_loss(rank: _Rank, before: float, saved: float, ends: float) -> Moment:
    """The loss, with the logits of `ends` micro-batches."""
    layout, loss = rank.case.layout, rank.case.loss
    gathered = rank.everything if layout.zero_stage < 3 else rank.root
    if layout.data > 1 and layout.zero_stage and (layout.accumulation == 1 or layout.zero_stage == 3):
        gathered += rank.fresh * rank.whole.layer  # the buffer of the last layer's arrival
    waiting = 4.0 * rank.whole.root if rank.early and before else 0.0
    return Moment(before, 0.0, saved + ends * loss.saved, 0.0, 0.0, ends * loss.logits, loss.work, gathered, waiting)


def _in_last_layer(rank: _Rank, before: float, saved: float) -> Moment:
    """The layer from which the backward pass starts; if layers are reduced, the one below it, if that is worse."""
    layer, layout, whole = rank.case.layer, rank.case.layout, rank.whole
    gathered = rank.everything
    if layout.data > 1 and layout.zero_stage == 3:
        gathered = rank.root + rank.fresh * whole.layer * min(2, whole.layers)
    if rank.reduces:
        waiting = 4.0 * whole.root if rank.early and before else 0.0
        reduced = max(waiting, 4 * whole.layer + rank.kept * rank.mine.layer - layer.saved - layer.casts)
        fresh = float(rank.fresh * whole.layer)
    else:  # of the largest matrix, a third of the layer, before it is added
        element = rank.case.workload.element
        reduced, fresh = 0.0, whole.layer / 3 * (element + 4 if before and element < 4 else 4)
    return Moment(before, rank.head + fresh, saved, layer.again, layer.work, 0.0, 0.0, gathered, reduced)


def _sums(rank: _Rank, before: float, done: float) -> float:
    """Summed gradients late in a backward pass in which `done` bytes have been finished."""
    if rank.reduces and not rank.early and rank.case.layout.zero_stage:
        return done + (4.0 * rank.whole.root if before else 0.0)  # whole sums give way to shards
    return max(before, done)


def _in_first_layer(rank: _Rank, before: float, saved: float) -> Moment:
    """The layer with which the backward pass ends; `saved`: its own activations, and those of other micro-batches."""
    layer, whole = rank.case.layer, rank.whole
    if not rank.reduces:
        sums = _sums(rank, before, 4.0 * whole.layer * whole.layers)
        return Moment(sums, rank.head, saved, layer.again, layer.work, 0.0, 0.0, rank.everything)
    sums = _sums(rank, before, float(rank.kept * rank.mine.layer * (whole.layers - 1)))
    fresh = float(rank.fresh * whole.layer)
    reduced = 4.0 * whole.layer if whole.layers > 1 else 0.0
    return Moment(sums, rank.head + fresh, saved, layer.again, layer.work, 0.0, 0.0, rank.root + fresh, reduced)


def _in_embedding(rank: _Rank, before: float, saved: float) -> Moment:
    """The embedding's gradient: that of the head, that of the tokens, and their sum exist at once."""
    whole, element, stream = rank.whole, rank.case.workload.element, rank.case.layer.stream
    fresh = 2 * rank.head + rank.fresh * whole.root
    if not rank.reduces:
        turned = rank.everything and element < 4  # sums of gathered parameters' gradients begin as float32 copies
        sums = _sums(rank, before, 4.0 * (whole.total if turned else whole.layer * whole.layers))
        return Moment(sums, fresh, saved, 0.0, stream, 0.0, 0.0, rank.everything)
    sums = _sums(rank, before, float(rank.kept * rank.mine.layer * whole.layers))
    reduced = 4.0 * whole.layer
    if (4 + element) * whole.root > fresh + reduced:
        fresh, reduced = float(element * whole.root), 4.0 * whole.root
    return Moment(sums, fresh, saved, 0.0, stream, 0.0, 0.0, rank.root, reduced)


def _between_micro_batches(rank: _Rank) -> list[Moment]:
    """Moments without a layer: earlier micro-batches' embedding, a pipeline's reduction, the optimiser's step."""
    layout, whole, moments = rank.case.layout, rank.whole, []
    if rank.reduces and layout.accumulation > 1 and layout.zero_stage in (1, 2):  # all parameters are still gathered
        sums = rank.before
        if not rank.early and layout.accumulation == 2:  # the first micro-batch's, in the making
            sums -= 4.0 * whole.root
        fresh = 2 * rank.head + rank.fresh * whole.root
        reduced = 4.0 * whole.layer if rank.early else 0.0
        moments.append(Moment(sums, fresh, gathered=rank.everything, reduced=reduced))
    if layout.data > 1 and not rank.reduces:  # group by group; a group's gathered copy is freed first
        group = whole.root or whole.layer
        gathered = rank.everything - rank.fresh * group
        moments.append(Moment(4.0 * whole.total, gathered=gathered, reduced=4.0 * group))
    exchanged = 0.0
    if layout.pipeline > 1 and (rank.first or rank.last):  # the tied embedding's gradient
        exchanged = 4.0 * rank.case.loss.weight / (layout.data if layout.zero_stage else 1)
    moments.append(Moment(float(rank.kept * rank.mine.total), reduced=exchanged))
    return moments
