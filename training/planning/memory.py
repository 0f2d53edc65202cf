"""The memory that a layout takes per GPU, in bytes.

A rank's memory peaks at one of a few moments of a step: in the loss, in the backward pass of its last or of its first
layer, in that of the embedding, or when the optimiser steps. Each moment is a sum of the same terms; the largest sum is
the prediction. tests/training/planning compares it with the trainer's real steps.
"""

from training.planning.activations import layer, loss
from training.planning.layout import Layout
from training.planning.machines import GIB, Machine
from training.planning.shards import held
from training.planning.terms import Term
from training.planning.workload import Workload

MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "communication", "context")
FEASIBLE, TIGHT = 0.80, 0.92  # shares of the memory: below the first a layout fits, from the second on it does not


def memory_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of the fullest GPU's peak within a step."""
    ranks = {0, 1 % layout.pipeline, layout.pipeline - 1}
    return max((rank_terms(workload, layout, machine, rank) for rank in sorted(ranks)), key=total)


def total(terms: list[Term]) -> float:
    """Bytes."""
    return sum(term.value for term in terms)


def in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at once, in all of its stages together."""
    pipeline, stages, count = layout.pipeline, layout.virtual_stages, layout.accumulation
    if pipeline == 1:
        return 1
    if layout.schedule == "gpipe":
        return count
    if stages == 1:
        return min(count, pipeline - rank)
    per_round = count // max(1, count // pipeline)
    passes = (stages - 1) * per_round + 2 * (pipeline - 1 - rank) + 1  # of one stage each
    return min(count * stages, passes) / stages


def rank_terms(workload: Workload, layout: Layout, machine: Machine, rank: int) -> list[Term]:
    """The terms of the peak of one pipeline rank: of the fullest of its ranks, at the worst moment."""
    moments, fixed = _moments(workload, layout, machine, rank)
    return []


def _moments(workload, layout, machine, rank):
    model, element, data, zero = workload.model, workload.element, layout.data, layout.zero_stage
    count, pipeline = layout.accumulation, layout.pipeline
    first, last = rank == 0, rank == pipeline - 1
    whole = held(model, layout, rank)
    mine = held(model, layout, rank, data) if zero else whole
    layers, per_layer, root = whole
    shared = data > 1
    gathers_always = shared and zero < 3
    wte = element  # placeholder
    one = layer(workload, layout, machine)
    head = loss(workload, layout, machine, one) if last else None
    kept = in_flight(layout, rank)
    ends = (count if layout.schedule == "gpipe" and pipeline > 1 else 1) if last else 0
    saved = kept * layers * (one.saved + one.casts)
    if pipeline > 1 and not first: saved -= kept / layout.virtual_stages * one.stream * 1
    received = 0.0
    if pipeline > 1:
        v = layout.virtual_stages
        received = count * one.stream * ((v - first) + (v - last))
        saved += kept / v * (v - last) * one.stream  # outputs kept
        if v > 1: saved -= kept / v * (v - 1) * one.stream
    weight = 0
    from training.parallel.vocabulary import padded_vocab_size
    weight = padded_vocab_size(model.vocab_size, layout.tensor) // layout.tensor * model.n_embd
    early_sync = shared and zero >= 2 and pipeline == 1
    # gradients of the micro-batches before
    before = 0.0
    if count > 1:
        before = 4 * mine.total if early_sync else 4 * whole.total
    e = element if shared else 4
    headgrad = e * weight if last else 0.0
    g_all = element * whole.total if shared else 0
    root_gathered = element * root if shared else 0
    two = element * per_layer * min(2, layers) if shared else 0
    sync = shared
    # loss
    gathered = 0
    if shared: gathered = g_all if zero < 3 else root_gathered
    late = 4 * root if early_sync and count > 1 else 0
    out = {}
    heads = ends * (head.saved + head.logits) if last else 0
    if last:
        out["loss"] = dict(grads=before, saved=saved + ends*head.saved, logits=ends*head.logits, loss=head.work, gathered=gathered, reduce=late)
        heads_after = (ends-1)*(head.saved+head.logits)
    else: heads_after = 0
    # top
    extra = one.saved + one.casts
    big = 4 * 4 * model.n_embd**2 // layout.tensor
    if shared:
        red_top = max(late, 4*per_layer - extra + 4*mine.layer) + element*per_layer
        gath = g_all if zero < 3 else root_gathered + two
    else:
        red_top = 4*per_layer if not before else (4+element if element<4 else 4)*big/4
        gath = 0
    out["top"] = dict(grads=before+headgrad, saved=saved+heads_after, work=one.again+one.work, gathered=gath, reduce=red_top)
    # bottom
    rest = saved - (layers-1)/layout.virtual_stages*(one.saved+one.casts) if pipeline==1 else saved*(1-1/kept/layout.virtual_stages)
    if shared:
        done = 4*mine.layer*(layers-1)
        g = (done if not before else max(done + 4*per_layer + 4*root, done+ 0*before)) if not early_sync else max(done,before)
        if zero==0: g = max(done, before)
        red = (4*per_layer if layers>1 else 0)+element*per_layer
        gath = root_gathered + (element*per_layer)
    else:
        g = max(before, 4*per_layer*layers); red=0; gath=0
    out["bottom"] = dict(grads=g+headgrad, saved=rest+heads_after, work=one.again+one.work, gathered=gath, reduce=red)
    rest2 = rest - (one.saved+one.casts)
    if first:
        done = 4*mine.layer*layers
        if shared:
            g = done + (4*root if before else 0) if not early_sync else max(done,before)
            if zero==0: g=max(done,before)
            x = 4*per_layer + (3 if last else 1)*element*weight
            y = element*root + 4*root + 4*mine.root
            out["embedding"]=dict(grads=g, saved=max(0,rest2)+heads_after, gathered=root_gathered, reduce=max(x,y), work=one.stream)
        else:
            out["embedding"]=dict(grads=max(before, done), saved=max(0,rest2)+heads_after, reduce=(3 if last else 1)*4*weight+4*model.seq_len*model.n_embd, work=one.stream)
    elif shared:
        out["end"]=dict(grads=4*mine.layer*layers+(4*root if before and not early_sync else 0), saved=max(0,rest2)+heads_after, gathered=root_gathered, reduce=4*per_layer+5*root)
    out["step"]=dict(grads=4*mine.total, exchange=(4*weight / (data if zero else 1)) if pipeline>1 and (first or last) else 0)
    fixed=dict(parameters=4*mine.total, optimizer=8*mine.total, pipe=received)
    return out, fixed
