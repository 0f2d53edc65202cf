"""The memory that a layout takes per GPU, in bytes.

    terms = memory_terms(workload, layout, machine)
    total(terms) < FEASIBLE * machine.memory

The terms are those of the fullest GPU at its peak, and what PyTorch, CUDA and NCCL take in
addition. The peak is the largest memory phase of a step. Phases are counted as the trainer's
modules save tensors and as FSDP2 gathers and reduces them; tests/training/planning compares them
with the trainer's steps. docs/planning_model.md has the formulas.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from common.settings import ModelSettings
from training.moments import ADAMW, moments_of
from training.parallel.sizes import EAGER_ELEMENTS, loss_parts, padded_vocab_size, stage_layers
from training.planning.layout import Layout, Term, Workload
from training.planning.machines import GIB, Machine
from training.tensors import LAYER_LEAVES, QKV, ROOT_LEAVES, Sizes

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "communication", "context")

_CUDA_CONTEXT = 0.5 * GIB  # driver and loaded kernels: an estimate until a GPU has been measured
_COMMUNICATOR = 0.2 * GIB  # NCCL's channels, per axis with more than one rank: an estimate
_FRAGMENTATION = 0.03  # of what PyTorch's allocator hands out, with expandable segments: an estimate
_PYTHON = 0.35 * GIB  # a process with torch loaded, without a GPU
_CPU_FRAGMENTATION = 0.25  # of what is allocated: glibc keeps freed memory


class Shards(NamedTuple):
    """Elements of parameters that one rank holds."""

    layers: int
    """Number of layers."""
    layer: int
    """Elements of a layer."""
    root: int
    """Elements of the embeddings and the last LayerNorm: FSDP's root group."""
    matrices: int
    """Elements of a layer's matrices."""

    @property
    def total(self) -> int:
        """All elements."""
        return self.layers * self.layer + self.root

    def moments(self, optimizer: str) -> int:
        """Elements of the moments that an optimiser keeps."""
        matrix = len(moments_of(LAYER_LEAVES[f"{QKV}.weight"], optimizer))
        return len(ADAMW) * self.total + (matrix - len(ADAMW)) * self.layers * self.matrices


def held(model: ModelSettings, layout: Layout, rank: int, ranks: int = 1) -> Shards:
    """The parameters of a pipeline rank. If ZeRO splits them over `ranks`: those of the first one.

    The token embedding is on the first and on the last stage.
    """
    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, padded_vocab_size(model.vocab_size, layout.tensor))
    first, last = rank == 0, rank == layout.pipeline - 1
    root = ("wte.weight",) * (first or last) + ("wpe.weight",) * first + ("ln_f.weight", "ln_f.bias") * last
    stages = layout.pipeline * layout.virtual_stages
    layers = model.n_layer // layout.pipeline
    if model.n_layer % stages:
        layers = sum(map(len, stage_layers(model.n_layer, stages)[rank :: layout.pipeline]))
    layer = _elements(tuple(LAYER_LEAVES), sizes, layout.tensor, ranks)
    matrices = tuple(name for name, leaf in LAYER_LEAVES.items() if leaf.conv1d)
    of_root, of_matrices = (_elements(names, sizes, layout.tensor, ranks) for names in (root, matrices))
    return Shards(layers, layer, of_root, of_matrices)


@lru_cache(maxsize=4096)  # the search calls it ten thousand times
def _elements(names: tuple[str, ...], sizes: Sizes, tensor: int, ranks: int) -> int:
    """Elements of tensors on the first rank, the fullest: FSDP splits each by rows, rounded up."""
    elements = 0
    for name in names:
        leaf = LAYER_LEAVES.get(name) or ROOT_LEAVES[name]
        shape = list(leaf.shape(sizes))
        if leaf.split is not None:
            shape[leaf.split] //= tensor
        elements += -(-shape[0] // ranks) * math.prod(shape[1:])
    return elements


def in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches whose activations a rank keeps at once; fractions with virtual stages."""
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


class _Layer(NamedTuple):
    """Bytes of one layer and micro-batch on one rank."""

    stream: float
    """The residual stream."""
    saved: float
    """Activations kept from the forward to the backward pass."""
    again: float
    """Activations that the backward pass computes again."""
    work: float
    """Gradients of activations that the backward pass holds at once."""


def _layer_bytes(workload: Workload, layout: Layout, machine: Machine) -> _Layer:
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    unit = float(element * tokens * model.n_embd)
    split = unit / tensor
    stream = split if layout.sequence_parallel else unit
    attention = kept_of_attention = 4 * split  # q, k, v and the result
    if machine.device == "cpu" and model.dropout:  # no fused kernel: float32 weights, mask and product, (s, s) per head
        attention, kept_of_attention = attention + 12.0 * model.n_head * tokens * model.seq_len / tensor, 3 * split
    # both LayerNorms' inputs; their outputs, whole also before split products; fc and gelu; two
    # masks of one byte
    everything = 2 * stream + 2 * unit + 8 * split + attention + (2 * stream / element if model.dropout else 0.0)
    # with sequence parallelism one activation is gathered
    work = stream + 4 * split + (unit if layout.sequence_parallel else 0.0)
    if layout.recompute == "none":
        return _Layer(stream, everything, 0.0, work)
    saved = stream
    if layout.recompute == "selective":
        # results of both projections, with several ranks before and after the sum; compiled, only
        # attention's sum
        eager = 2 * unit + (2 * stream if tensor > 1 else 0)
        saved += (stream if workload.compiled else eager) + 4 * split + kept_of_attention
    return _Layer(stream, saved, max(0.0, everything - saved), work)


class _Loss(NamedTuple):
    """Bytes of the loss of one micro-batch, on a rank of the last stage."""

    saved: float
    """The last LayerNorm's input and output, while the loss is computed."""
    logits: float
    """Logits, or one part of them, which their gradient overwrites."""
    work: float
    """Gradients of the input and of the weight, at the peak."""
    kept: float
    """The last LayerNorm's input and these gradients, from the loss to the backward pass."""


def _loss_bytes(workload: Workload, layout: Layout, machine: Machine) -> _Loss:
    model, element, tensor = workload.model, workload.element, layout.tensor
    tokens = layout.micro_batch_size * model.seq_len
    weight = _head(workload, layout)
    unit, elements = element * tokens * model.n_embd, tokens * weight // model.n_embd
    stream = float(unit / tensor if layout.sequence_parallel else unit)
    saved = stream + unit
    logits = float(element * elements)
    parts = loss_parts(workload.loss, elements * element, machine.memory if machine.device == "cuda" else None)
    # eager mode computes some rows at a time, in two float32 tensors
    wide = 0.0 if workload.compiled else 2 * 4.0 * min(elements // parts, EAGER_ELEMENTS[machine.device])
    rounded = element * weight if element < 4 and machine.device == "cpu" else 0  # the result of a CPU's product
    gradients = unit + 4.0 * weight * (2 if parts > 1 else 1) + rounded
    own = element if layout.data > 1 else 4  # bytes per element of the weight's gradient
    return _Loss(saved, logits / parts, max(wide, gradients), stream + unit + own * weight)


def _head(workload: Workload, layout: Layout) -> int:
    """Elements of the head's matrix on a rank."""
    return padded_vocab_size(workload.model.vocab_size, layout.tensor) // layout.tensor * workload.model.n_embd


class MemoryPhase(NamedTuple):
    """Bytes of a pipeline rank in one phase of a step; `_NAMES` says what each field is."""

    parameters: float
    moments: float
    buffers: float
    rounded: float
    gradients: float
    fresh: float = 0.0
    saved: float = 0.0
    again: float = 0.0
    work: float = 0.0
    logits: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0


_NAMES = {  # part and name of each field (ZeRO: Rajbhandari et al. 2020, section 5)
    "parameters": ("parameters", "float32 parameters"),
    "moments": ("optimizer", "moments: AdamW's two, Muon's one"),
    # PyTorch's pipelines allocate one per micro-batch, 1F1B reuses free ones
    "buffers": ("communication", "receive buffers of the pipeline"),
    # with data-parallel ranks they are gathered
    "rounded": ("parameters", "matrices in the type of the products"),
    "gradients": ("gradients", "summed gradients, float32"),
    "fresh": ("gradients", "new gradients of a layer"),
    "again": ("activations", "one layer's activations, computed again"),
    "work": ("activations", "gradients of activations"),
    "logits": ("logits and loss", "logits"),
    "loss": ("logits and loss", "gradients of head and input, or float32 logits"),
    "gathered": ("communication", "gathered parameters"),
    "reduced": ("communication", "gradients being reduced"),
    "saved": ("activations", "kept from forward to backward"),
}


def peak(workload: Workload, layout: Layout, machine: Machine, rank: int) -> MemoryPhase:
    """The fullest phase of a pipeline rank."""
    return max(_phases(workload, layout, machine, rank), key=sum)


def _phases(workload: Workload, layout: Layout, machine: Machine, rank: int) -> Iterator[MemoryPhase]:
    """The phases that may be the peak: the loss, the backward passes of the last and first layer.

    ZeRO 0 to 2 keep gathered copies during a step, ZeRO 3 only those of the embeddings and two
    layers. Without a pipeline, each layer's gradients are reduced as soon as they exist; with a
    pipeline, all of them at the end.
    """
    layer, loss = _layer_bytes(workload, layout, machine), _loss_bytes(workload, layout, machine)
    zero, data, count, virtual = layout.zero_stage, layout.data > 1, layout.accumulation, layout.virtual_stages
    first, last = rank == 0, rank == layout.pipeline - 1
    whole = held(workload.model, layout, rank)
    mine = held(workload.model, layout, rank, layout.data) if zero else whole
    by_layer = data and layout.pipeline == 1
    kept = 0 if layout.offload else 4  # bytes per element of parameters and of reduced gradients
    copy = workload.element if data else 0  # bytes per element of a gathered copy, and of its gradient
    everything = float(copy * whole.total)
    flying = in_flight(layout, rank)
    received: float = count * (2 * virtual - first - last) if layout.pipeline > 1 else 0
    if received and layout.schedule == "1f1b":
        received = (0 if first else flying) + (not last)  # activations until their backward pass, one gradient
    rounded = 0.0
    if workload.element < 4 and not data:
        multiplied = 12 * whole.layers * workload.model.n_embd**2 // layout.tensor + last * _head(workload, layout)
        rounded = float(workload.element * multiplied)
    owned = float(kept * mine.total)
    moments = float(kept * mine.moments(workload.optimizer))
    phase = MemoryPhase(owned, moments, received * layer.stream, rounded, 0.0)

    before = 0.0  # sums of earlier micro-batches; none while all micro-batches are in flight
    if count > flying:
        before = float(kept * mine.total if by_layer and zero >= 2 else 4 * whole.total)
    # the embeddings' gradient, being reduced
    waiting = 4.0 * whole.root if by_layer and zero >= 2 and before else 0.0
    saved = flying * whole.layers * layer.saved
    if layout.pipeline > 1:  # outputs are kept until the end; inputs are in the buffers, or are such outputs
        saved += flying * layer.stream * (first - last) / virtual

    if last:
        ends = flying if layout.schedule == "gpipe" else 1.0
        yield phase._replace(
            gradients=before, saved=saved + (ends - 1) * loss.kept + loss.saved, logits=loss.logits, loss=loss.work,
            gathered=everything if zero < 3 else float(copy * whole.root), reduced=waiting,
        )  # fmt: skip
        saved += (ends - 1) * loss.kept

    phase = phase._replace(again=layer.again, work=layer.work)
    two_layers = float(copy * (whole.root + whole.layer * min(2, whole.layers)))
    in_last_layer = phase._replace(gradients=before, saved=saved, gathered=two_layers if zero == 3 else everything)
    saved -= (whole.layers / virtual - 1) * layer.saved
    if by_layer:
        reduced = max(waiting, 4 * whole.layer + kept * mine.layer - layer.saved)
        yield in_last_layer._replace(fresh=float(copy * whole.layer), reduced=reduced)
        sums = float(kept * mine.layer * (whole.layers - 1))
        sums = sums if zero == 1 else max(before, sums)  # ZeRO 1 replaces full sums by shards
        gathered = float(copy * (whole.root + whole.layer))
        yield phase._replace(gradients=sums, fresh=float(copy * whole.layer), saved=saved, gathered=gathered)
    else:
        yield in_last_layer._replace(fresh=4 / 3 * whole.layer)  # gradient of the largest matrix, before it is added
        sums = max(before, 4.0 * whole.layer * whole.layers)
        yield phase._replace(gradients=sums, saved=saved, gathered=everything)


def memory_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of the fullest GPU's peak within a step."""
    # rank 0 keeps the most micro-batches and the embedding, the last rank has the head, the others
    # more buffers
    ranks = {0, 1 % layout.pipeline, layout.pipeline - 1}
    phase = max((peak(workload, layout, machine, rank) for rank in ranks), key=sum)
    terms = [Term(part, getattr(phase, key), name) for key, (part, name) in _NAMES.items()]
    allocated = sum(phase)
    if machine.device == "cpu":
        terms.append(Term("context", _PYTHON, "Python and PyTorch"))
        terms.append(Term("context", _CPU_FRAGMENTATION * allocated, "allocator: memory that glibc keeps"))
    else:
        axes = sum(ranks > 1 for ranks in (layout.tensor, layout.data, layout.pipeline))
        terms.append(Term("communication", axes * _COMMUNICATOR, "NCCL's buffers"))
        terms.append(Term("context", _CUDA_CONTEXT, "CUDA context"))
        terms.append(Term("context", _FRAGMENTATION * allocated, "allocator: rounding and gaps"))
    return [term for term in terms if term.value]
