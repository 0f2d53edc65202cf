"""The time of one optimiser step in a layout, in seconds.

The busiest pipeline rank sets the pace: its terms for all micro-batches, then what it waits for the others, then what
is done once per step. The model is of this trainer: flash attention, recompute that keeps products, ZeRO by FSDP2.

Symbols: b micro-batch, m micro-batches per step, s sequence, h width, a heads, l layers of the rank, L of all, V padded
vocabulary, t tensor, p pipeline, v virtual stages, d data, e bytes of an activation, n parameters of the GPU. Rates
(`training.planning.rates`): R products, F float32, W memory, N link.
"""

from training.logits_memory import loss_parts
from training.parallel.vocabulary import padded_vocab_size
from training.planning.flops import recomputed_squares
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.rates import Rates, group, rates_of
from training.planning.terms import Term
from training.planning.traffic import (
    Links,
    Traffic,
    links,
    parameters,
    ranks,
    rounds,
    sum_bytes,
    sums_per_layer,
    traffic,
)
from training.planning.workload import Workload

__all__ = ["Links", "attention_seconds", "links", "speed_terms"]

_HOST_LINK = 25e9  # bytes/s: PCIe 4 between GPU and host in practice; a GPU's share of the host's memory is similar

# Elements that a layer reads and writes per token, in widths (h): forward and backward, outside the split matrices
# (LayerNorms 6, residuals 11, gradients of biases 2) and inside (GELU 20, gradients of biases 7, heads put together 2,
# gradients of q, k, v: sums in float32 6, put together 6).
_OUTSIDE = {True: 19.0, False: 28.0}  # compiled: neighbours are fused; eager: each operation by itself
_INSIDE = 41.0
_OUTSIDE_AGAIN, _INSIDE_AGAIN = 6.0, 10.0  # recomputed: all of the forward pass but the last residual
_DROPOUT = {True: 6.0, False: 10.0}  # two masks of one byte, written and read, and a pass over the branch's gradient
_SLICES = 16.0  # sequence parallelism at b > 1: eight times, slices of samples are put in order
_KERNELS = {True: 15, False: 45}  # per layer, beside products and attention
_EAGER_LOGIT = 56  # bytes per logit: seven passes over float32 copies, forward and backward
_ADAMW = 40.0  # bytes per parameter: gradient norm 4, clipping 8, AdamW 28

_FLASH = "Dao 2023, FlashAttention-2"
_CHEN = "Chen et al. 2016"
_SHOEYBI = "Shoeybi et al. 2019, section 3"
_NARAYANAN = "Narayanan et al. 2021, section 2.2"
_ZERO = "Rajbhandari et al. 2020, section 7"


def speed_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of a step's time that are not hidden behind each other; their sum is the time of the step."""
    model, rates, gpu = workload.model, rates_of(machine), machine.gpu
    b, m, t, p, v = layout.micro_batch_size, layout.accumulation, layout.tensor, layout.pipeline, layout.virtual_stages
    h, e, rows, compiled = model.n_embd, workload.element, b * model.seq_len, workload.compiled
    flops = rates.products * machine.peak_flops(workload.precision)
    memory, start = rates.bandwidth * gpu.memory_gb_per_s * 1e9, rates.start

    def product(inner: float, columns: float, rows: float = rows) -> float:
        """(rows, inner) x (inner, columns): its operations, its three matrices, its start."""
        moved = rows * inner + inner * columns + rows * columns
        return 2 * rows * inner * columns / flops + e * moved / memory + start

    # a layer and one micro-batch
    last_product = product(4 * h / t, h)
    products = product(h, 3 * h / t) + product(h / t, h) + product(h, 4 * h / t) + last_product
    attention_forward, attention_backward = attention_seconds(workload, layout, machine)
    attention = attention_forward + attention_backward
    width, split = e * rows * h / memory, 1 / t if layout.sequence_parallel else 1.0
    passes = _OUTSIDE[compiled] * split + _INSIDE / t + (_DROPOUT[compiled] * split if model.dropout else 0.0)
    passes += _SLICES if layout.sequence_parallel and b > 1 else 0.0
    moves = width * passes + start * _KERNELS[compiled]
    again = 0.0
    if layout.recompute != "none":
        again = width * (_OUTSIDE_AGAIN * split + _INSIDE_AGAIN / t) + start * _KERNELS[compiled] / 3
    if layout.recompute == "full":
        again += products - (last_product if recomputed_squares(workload, layout) == 8 else 0) + attention_forward
    one_sum = 0.0
    if t > 1:
        tensor_ranks = group(machine, t, 1, layout.world_size)
        one_sum = sum_bytes(workload, layout) / tensor_ranks.bandwidth + 2 * tensor_ranks.latency
    sums = sums_per_layer(layout) * one_sum
    of_layer = 3 * products + attention + moves + again + sums

    # the head and one micro-batch
    columns = padded_vocab_size(model.vocab_size, t) // t
    parts = loss_parts(workload.loss, rows * columns * e, machine.memory if machine.device == "cuda" else None)
    of_logits = (4 * e if compiled or machine.device == "cpu" else _EAGER_LOGIT) * rows * columns
    of_parts = 16 * parts * columns * h if parts > 1 else 0.0  # each part's gradient is added to the weight's
    head = 3 * parts * product(h, columns, rows / parts) + (of_logits + of_parts) / memory

    # the rank
    first, last = ranks(model.n_layer, layout)
    rank = last if last.layers * of_layer + head >= first.layers * of_layer else first
    layers, sent = rank.layers, traffic(workload, layout, machine, rank)
    edges = one_sum * (1 + rank.head if p == 1 else 1)
    hop = 0.0
    if p > 1:
        hop = sent.pipeline / m / sent.pipeline_ranks.bandwidth + 2 * v * sent.pipeline_ranks.latency
    held, outside = parameters(workload, layout, rank)
    weights = _weights_bytes(layout, held, e) / memory / m
    others = (model.n_layer - layers) * of_layer + (0.0 if rank.head else head) + (p - 1) * (hop + weights)
    busy = layers * of_layer + (head if rank.head else 0.0) + edges + hop + weights
    host = _host_seconds(rates, workload, layout, layers)
    waits = m * (host if machine.device == "cpu" else max(0.0, host - busy))

    terms = [
        Term("matrix products", 3 * m * layers * products, "of layers, forward and backward",
             "3 m l sum(2 r k c / R + e (r k + k c + r c) / W + start), r = b s"),
        Term("attention", m * layers * attention, "the causal half of the scores",
             "m l (a / t) b s^2 / 2 (14 (h / a) / R + 100 / F)", _FLASH),
        Term("memory traffic", m * layers * moves, "LayerNorm, GELU, residuals, dropout", _PASSES[compiled]),
        Term("memory traffic", m * weights, "weights cast, gradients accumulated",
             "n (24 m - 12) / W; d > 1: n (10 m + 2 + 4 gathers + 8 scatters) / W"),
        Term("logits and loss", m * head if rank.head else 0.0, "head and cross-entropy",
             "3 m product(b s, h, V / t) + 4 e m b s V / (t W)"),
        Term("recompute", m * layers * again, layout.recompute,
             "selective: (6 + 10 / t) passes; full: and the layer's forward products and attention", _CHEN),
        Term("tensor-parallel communication", m * (layers * sums + edges), "sums of activations",
             "m (4 l + 2) 2 (t - 1) / t e b s h / N", _SHOEYBI),
        Term("pipeline bubble", others / v, "one micro-batch on the other ranks",
             "(p - 1) / v (time of a micro-batch on a rank)", _NARAYANAN),
        Term("pipeline communication", m * hop, "activations and their gradients", "2 m v e b s h / N", _NARAYANAN),
        Term("pipeline communication", sent.tied / sent.pipeline_ranks.bandwidth, "the tied embedding's gradient",
             "4 V h / (t N)"),
        *_data_parallel(layout, rates, sent, outside / held, (busy - hop) / 3),
        *_update(layout, held, memory),
        Term("overhead", waits, "launches that the device waits for", "m max(0, host - device)"),
        Term("overhead", rates.step, "once per step", "constant"),
    ]  # fmt: skip
    return [term for term in terms if term.value]


_PASSES = {
    True: "m l (19 + 41 / t) e b s h / W; with dropout 25; 19 / t with sequence parallelism",
    False: "m l (28 + 41 / t) e b s h / W; with dropout 38; 28 / t with sequence parallelism",
}


def attention_seconds(workload: Workload, layout: Layout, machine: Machine) -> tuple[float, float]:
    """Attention of a layer and a micro-batch, forward and backward: the causal half, two products and five."""
    model, rates = workload.model, rates_of(machine)
    head_size = model.n_embd // model.n_head
    scores = layout.micro_batch_size * (model.n_head / layout.tensor) * model.seq_len**2 / 2
    flops = rates.products * machine.peak_flops(workload.precision)
    operations = rates.vector_operations + (rates.dropout_operations if model.dropout else 0)
    vector = operations / (machine.gpu.float32_tflops * 1e12)
    forward = scores * (4 * head_size / flops + vector / 3) + rates.start
    return forward, scores * (10 * head_size / flops + vector * 2 / 3) + rates.start


def _weights_bytes(layout: Layout, held: float, element: int) -> float:
    """Bytes that a step moves to cast weights (6 per parameter), cast their gradients (6) and accumulate them (12).

    Data parallelism casts weights once, adds gradients in the type of the products (10), and copies what is gathered
    (4) and scattered (8) into and out of buffers.
    """
    m = layout.accumulation
    if layout.data == 1:
        return held * (12 * (m - 1) + (12 * m if element == 2 else 0))
    gathers, scatters = rounds(layout)
    return held * ((10 * m + 2 if element == 2 else 12 * (m - 1)) + 4 * gathers + 8 * scatters)


def _data_parallel(layout: Layout, rates: Rates, sent: Traffic, outside: float, third: float) -> list[Term]:
    """What computation does not hide; `third`: seconds of a micro-batch's forward pass, half of its backward pass.

    Each layer is one group of parameters. The group outside layers, a share `outside` of all, is gathered first and
    scattered last: its communication has nothing to hide behind.
    """
    gathers, scatters = rounds(layout)
    members = sent.data_ranks

    def exposed(sent_bytes: float, times: int, window: float) -> float:
        seconds = sent_bytes / members.bandwidth
        behind = min((1 - outside) * seconds, window) if rates.hidden < 1 else 0.0
        return seconds - (1 - rates.hidden) * behind + times * members.latency

    windows = third * gathers * (1.5 if gathers == 2 * layout.accumulation else 1)  # with ZeRO 3 in both passes
    return [
        Term("data-parallel communication", exposed(sent.gradients, scatters, 2 * third * scatters), "gradients",
             "4 n (d - 1) / (d N), twice for ZeRO 0, m times from ZeRO 2 on; less what the backward pass hides", _ZERO),
        Term("data-parallel communication", exposed(sent.gathers, gathers, windows), "parameters",
             "e n (d - 1) / (d N), 2 m times for ZeRO 3; less what computation hides", _ZERO),
    ]  # fmt: skip


def _update(layout: Layout, held: float, memory: float) -> list[Term]:
    """The optimiser; offloaded, shards cross the host's link in float32, and AdamW runs in the host's memory."""
    shard = held / (layout.data if layout.zero_stage else 1)
    if not layout.offload:
        return [Term("optimizer", _ADAMW * shard / memory, "norm, clipping, AdamW", "40 n / W; / d from ZeRO 1 on")]
    crossed = 4 * shard * sum(rounds(layout)) / _HOST_LINK
    return [
        Term("optimizer", _ADAMW * shard / _HOST_LINK, "norm, clipping, AdamW on the host", "40 n / d / 25 GB/s"),
        Term("offload", crossed, "shards to and from the host", "4 n / d (gathers + scatters) / 25 GB/s"),
    ]


def _host_seconds(rates: Rates, workload: Workload, layout: Layout, layers: int) -> float:
    """What the host takes for a micro-batch."""
    of_layer = rates.compiled_layer if workload.compiled else rates.eager_layer
    if layout.recompute != "none":
        of_layer *= 4 / 3
    of_layer += rates.parallel_layer * ((layout.tensor > 1) + (layout.data > 1))
    return layers * of_layer + rates.micro_batch * layout.virtual_stages
