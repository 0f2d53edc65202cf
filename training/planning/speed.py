"""The time of one optimiser step in a layout, in seconds.

The busiest pipeline rank sets the pace: its work for all micro-batches, its waiting for other
ranks, and its work once per step. Predicts this trainer: flash attention, recompute that keeps
products, ZeRO by FSDP2. docs/planning_model.md has the formulas; `python -m benchmarks.training
planning` shows errors against published runs.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.settings import ModelSettings
from training.parallel.sizes import padded_vocab_size
from training.planning.layout import Layout, Term, Workload
from training.planning.machines import Machine
from training.planning.memory import Shards, held
from training.planning.traffic import Traffic, rounds, sums_per_layer, traffic

CONVENTION = "6N+12Lhs"
"""How operations are counted (Chowdhery et al. 2022, appendix B): see `flops_per_token`."""

# share of the peak: products alone reach 770 to 800 of 989 TFLOP/s on an H200, in a step clocks are
# lower
PRODUCTS = 0.77
# share of the memory's bandwidth: copies reach .9 on an H200 (4.3 of 4.8 TB/s), kernels with sums
# over rows less
BANDWIDTH = 0.82
_START = 4e-6  # seconds per kernel: launch, filling and draining the device
_HIDDEN = 0.1  # what hidden communication still costs: NCCL takes multiprocessors and the memory's bandwidth
# Float32 operations per attention score in addition to the products: calibrated, between
# FlashAttention-2 on A100 and cuDNN on H100. Dropout: 60 instructions of Philox per eight numbers,
# and the mask, both twice.
_SCORE, _SCORE_DROPOUT = 100.0, 40.0
_HOST_LINK = 25e9  # bytes/s: PCIe 4 between GPU and host in practice; a GPU's share of the host's memory is similar

# Elements that a layer reads and writes per token, in widths: forward and backward, outside the
# split matrices (LayerNorms 6, residuals 11, gradients of biases 2) and inside (GELU 20, gradients
# of biases 7, heads put together 2, gradients of q, k, v: sums in float32 6, put together 6).
_OUTSIDE, _INSIDE = 19.0, 41.0
_OUTSIDE_AGAIN, _INSIDE_AGAIN = 6.0, 10.0  # recomputed: the forward pass without the last residual
_SLICES = 16.0  # sequence parallelism with several samples reorders slices of samples eight times
_KERNELS = {True: 15, False: 45}  # per layer, without products and attention; compiled and eager
_EAGER_LOGIT = 56  # bytes per logit: seven passes over float32 copies, forward and backward
_ADAMW = 40.0  # bytes per parameter: gradient norm 4, clipping 8, AdamW 28


def flops_per_token(model: ModelSettings, attention: float = 1.0) -> int:
    """Operations per token: 6 (N - wpe) + 12 L h s, for N parameters and L layers of width h.

    Two operations per weight in the forward pass and four in the backward pass, plus attention's
    two products. This is the model's work in any layout: vocabulary padding and recompute do not
    count, the masked half of attention does. Attention counts times the share `attention` (see
    `within_documents`).
    """
    positions = model.seq_len * model.n_embd  # wpe is only looked up; wte is multiplied in the head
    products = 12 * model.n_layer * model.n_embd * model.seq_len
    return 6 * (model.parameters - positions) + round(products * attention)


def within_documents(lengths: npt.NDArray[np.int64], seq_len: int) -> float:
    """Tokens that a token attends to within its document, as a share of those in a whole sample.

    The mean over all tokens of documents with these `lengths`, cut into samples anywhere: token i
    of a document sees itself and the min(i, u) tokens before it, where its index u in the sample is
    any of 0 to seq_len - 1.
    """
    first = np.arange(seq_len)
    seen, whole = np.cumsum((first + 1) * (seq_len - first / 2) / seq_len), (seq_len + 1) / 2
    filled = lengths[lengths > 0]
    total = seen[np.minimum(filled, seq_len) - 1] + np.maximum(0, filled - seq_len) * whole
    return float(total.sum() / (filled.sum() * whole))


def busiest_traffic(workload: Workload, layout: Layout, machine: Machine) -> Traffic:
    """The traffic of a GPU of the pipeline rank with the most layers."""
    ranks = (held(workload.model, layout, rank) for rank in (layout.pipeline - 1, 0))
    return traffic(workload, layout, machine, max(ranks, key=lambda shards: shards.layers))


def speed_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of a step's time, without what computation hides: their sum is the step's time."""
    model, pipeline, accumulation = workload.model, layout.pipeline, layout.accumulation
    layer, head = _layer_seconds(workload, layout, machine), _head_seconds(workload, layout, machine)

    # the rank with the most work
    first, last = held(model, layout, 0), held(model, layout, pipeline - 1)
    has_head = last.layers * layer.total + head >= first.layers * layer.total
    shards = last if has_head else first
    layers = accumulation * shards.layers  # computed per step

    # one micro-batch on it
    sent = traffic(workload, layout, machine, shards)
    sums = 0.0
    if layout.tensor > 1:
        sums = sent.tensor / sent.tensor_ranks.bandwidth
        sums += 2 * layers * sums_per_layer(layout) * sent.tensor_ranks.latency
    send = sent.pipeline / accumulation / sent.pipeline_ranks.bandwidth
    weights = _weight_bytes(layout, shards.total, workload.element) / _memory_rate(machine) / accumulation
    layer_and_sums = layer.total + sums / accumulation / shards.layers
    busy = shards.layers * layer_and_sums + head * has_head + weights
    others = (model.n_layer - shards.layers) * layer_and_sums + (pipeline - 1) * (send + weights)

    terms = [
        Term("matrix products", 3 * layers * layer.products, "of layers, forward and backward"),
        Term("attention", layers * layer.attention, "the causal half of the scores"),
        Term("memory traffic", layers * layer.elementwise, "LayerNorm, GELU, residuals"),
        Term("memory traffic", accumulation * weights, "weights rounded, gradients accumulated"),
        Term("logits and loss", accumulation * head * has_head, "head and cross-entropy"),
        Term("recompute", layers * layer.recompute, layout.recompute),
        Term("tensor-parallel communication", sums, "sums of activations"),
        Term("pipeline bubble", others / layout.virtual_stages, "one micro-batch on the other ranks"),
        Term("pipeline communication", accumulation * send, "activations and their gradients"),
        *_data_parallel(layout, sent, busy / 3),
        *_update(layout, shards, _memory_rate(machine)),
        *(_newton_schulz(workload, layout, machine, sent, shards.layers) if workload.optimizer == "muon" else ()),
    ]
    return [term for term in terms if term.value]


class _LayerSeconds(NamedTuple):
    """Seconds of one layer and micro-batch on one rank."""

    products: float
    """In the forward pass; the backward pass takes twice as long."""
    attention: float
    elementwise: float
    recompute: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return 3 * self.products + self.attention + self.elementwise + self.recompute


def _layer_seconds(workload: Workload, layout: Layout, machine: Machine) -> _LayerSeconds:
    width, tensor, compiled = workload.model.n_embd, layout.tensor, workload.compiled
    product = partial(_product, workload, layout, machine)
    mlp_projection = product(4 * width / tensor, width)
    products = product(width, 3 * width / tensor) + product(width / tensor, width) + product(width, 4 * width / tensor)
    products += mlp_projection
    attention_forward, attention_backward = attention_seconds(workload, layout, machine)

    tokens = layout.micro_batch_size * workload.model.seq_len
    one_pass = workload.element * tokens * width / _memory_rate(machine)
    outside, starts = 1 / tensor if layout.sequence_parallel else 1.0, _START * _KERNELS[compiled]
    slices = _SLICES if layout.sequence_parallel and layout.micro_batch_size > 1 else 0.0
    elementwise = one_pass * (_OUTSIDE * outside + _INSIDE / tensor + slices) + starts
    recompute = 0.0
    if layout.recompute != "none":
        recompute = one_pass * (_OUTSIDE_AGAIN * outside + _INSIDE_AGAIN / tensor) + starts / 3
    if layout.recompute == "full":
        # the backward pass does not need the result of the last product, unless eager dropout
        # follows
        skipped = 0 if workload.model.dropout and not compiled else mlp_projection
        recompute += products - skipped + attention_forward
    return _LayerSeconds(products, attention_forward + attention_backward, elementwise, recompute)


def _head_seconds(workload: Workload, layout: Layout, machine: Machine) -> float:
    """Seconds of logits and loss of a micro-batch, forward and backward."""
    model, columns = workload.model, padded_vocab_size(workload.model.vocab_size, layout.tensor) // layout.tensor
    per_logit = 4 * workload.element if workload.compiled or machine.device == "cpu" else _EAGER_LOGIT
    moved = per_logit * layout.micro_batch_size * model.seq_len * columns
    return 3 * _product(workload, layout, machine, model.n_embd, columns) + moved / _memory_rate(machine)


def _product(workload: Workload, layout: Layout, machine: Machine, inner: float, columns: float) -> float:
    """Seconds of (tokens, inner) x (inner, columns): operations, its three matrices, its start."""
    rows, rate = layout.micro_batch_size * workload.model.seq_len, PRODUCTS * machine.peak_flops(workload.precision)
    moved = workload.element * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns / rate + moved / _memory_rate(machine) + _START


def _memory_rate(machine: Machine) -> float:
    """Bytes per second that kernels reach."""
    return BANDWIDTH * machine.gpu.memory_gb_per_s * 1e9


def attention_seconds(workload: Workload, layout: Layout, machine: Machine) -> tuple[float, float]:
    """Seconds of a layer's attention per micro-batch, forward and backward.

    The causal half, two products forward and five backward (Dao 2023, FlashAttention-2).
    """
    model = workload.model
    head_size = model.n_embd // model.n_head
    scores = layout.micro_batch_size * (model.n_head / layout.tensor) * model.seq_len**2 / 2 * workload.attention
    flops = PRODUCTS * machine.peak_flops(workload.precision)
    vector = (_SCORE + _SCORE_DROPOUT * (model.dropout > 0)) / (machine.gpu.float32_tflops * 1e12)
    forward = scores * (4 * head_size / flops + vector / 3) + _START
    return forward, scores * (10 * head_size / flops + vector * 2 / 3) + _START


def _weight_bytes(layout: Layout, parameters: int, element: int) -> float:
    """Bytes moved to round weights once per step (6 per parameter) and to sum gradients (12).

    Data parallelism casts weights once, adds gradients in the type of the products (10), and copies
    gathered (4) and scattered (8) tensors into and out of buffers.
    """
    count = layout.accumulation
    if layout.data == 1:
        return parameters * (12 * (count - 1) + (6 if element == 2 else 0))
    gathers, scatters = rounds(layout)
    return parameters * ((10 * count + 2 if element == 2 else 12 * (count - 1)) + 4 * gathers + 8 * scatters)


def _data_parallel(layout: Layout, sent: Traffic, forward: float) -> list[Term]:
    """Communication that computation does not hide; `forward`: seconds of one forward pass."""
    gathers, scatters = rounds(layout)

    def exposed(sent_bytes: float, window: float) -> float:
        seconds = sent_bytes / sent.data_ranks.bandwidth
        return seconds - (1 - _HIDDEN) * min(seconds, window)

    windows = forward * gathers * (1.5 if gathers == 2 * layout.accumulation else 1)  # with ZeRO 3 in both passes
    return [
        Term("data-parallel communication", exposed(sent.gradients, 2 * forward * scatters), "gradients"),
        Term("data-parallel communication", exposed(sent.gathers, windows), "parameters"),
    ]


def _update(layout: Layout, shards: Shards, memory_rate: float) -> list[Term]:
    """The optimiser; if offloaded, in the host's memory, with float32 shards crossing the link."""
    parameters = shards.total / (layout.data if layout.zero_stage else 1)
    if not layout.offload:
        return [Term("optimizer", _ADAMW * parameters / memory_rate, "norm, clipping, AdamW")]
    crossed = 4 * parameters * sum(rounds(layout)) / _HOST_LINK
    return [
        Term("optimizer", _ADAMW * parameters / _HOST_LINK, "norm, clipping, AdamW on the host"),
        Term("offload", crossed, "shards to and from the host"),
    ]


def _newton_schulz(workload: Workload, layout: Layout, machine: Machine, sent: Traffic, layers: int) -> list[Term]:
    """Muon's Newton-Schulz on whole matrices, spread over a stage's ranks, and its all-to-alls.

    Five iterations of 4 m^2 n + 2 m^3 operations for a matrix (m, n), m <= n: per layer q, k, v and
    attention's projection, each (h, h), and two of (h, 4h). In the type of the products, shards go
    to the rank of their matrix, and the result to each rank with a part of it. ZeRO 0 sends only
    results, but to all data ranks.
    """
    width, ranks = workload.model.n_embd, layout.tensor * layout.data
    flops = 5 * (4 * 6 + 2 * 18) * width**3 * layers  # 6 m^3 for each square one, 18 m^3 for each of the MLP
    rate = PRODUCTS * machine.peak_flops(workload.precision)
    spread = min(ranks, 4 * layers)  # matrices are not split
    members = sent.data_ranks if layout.data > 1 else sent.tensor_ranks
    parts = layout.tensor * (layout.data if layout.zero_stage else 1)
    shares = (parts - 1) / parts / ranks + (ranks - 1) / ranks / parts  # that a rank receives of all matrices
    moved = workload.element * 12 * width**2 * layers * shares
    return [
        Term("optimizer", flops / rate / spread, "Newton-Schulz"),
        Term("optimizer", moved / members.bandwidth, "shards of matrices to and from their ranks"),
    ]
