"""The time of one optimiser step in a layout, in seconds.

The busiest pipeline rank sets the pace: its terms for all micro-batches, then what it waits for the others, then what
is done once per step. The model is of this trainer: flash attention, recompute that keeps products, ZeRO by FSDP2.

Symbols: b micro-batch, m micro-batches per step, s sequence, h width, a heads, l layers of the rank, L of all, V padded
vocabulary, t tensor, p pipeline, v virtual stages, d data, e bytes of an activation, n parameters of the GPU. Rates: R
products, F float32, W memory, N link. `python -m benchmarks.training planning` shows the errors against published runs.
"""

from common.settings import ModelSettings
from training.parallel.sizes import padded_vocab_size
from training.planning.layout import Layout, Term, Workload
from training.planning.machines import Machine
from training.planning.memory import Shards, held
from training.planning.traffic import Traffic, rounds, sums_per_layer, traffic

CONVENTION = "6N+12Lhs"
"""Of counting operations (Chowdhery et al. 2022, appendix B; nanoGPT counts the same), see `flops_per_token`."""

PRODUCTS = 0.77  # of the peak; alone 770 to 800 of 989 TFLOP/s on an H200, less in a step, whose load lowers clocks
BANDWIDTH = 0.82  # of the memory's; copies reach .9 on an H200 (4.3 of 4.8 TB/s), kernels with sums over rows less
_START = 4e-6  # seconds of each kernel: launch, filling and draining the device
_HIDDEN = 0.1  # of communication behind computation: NCCL takes multiprocessors and the memory's bandwidth
# Float32 operations per attention score beside the products: calibrated, between FlashAttention-2 on A100 and cuDNN on
# H100. Dropout: Philox has 60 instructions per eight numbers, and the mask, twice.
_SCORE, _SCORE_DROPOUT = 100.0, 40.0
_HOST_LINK = 25e9  # bytes/s: PCIe 4 between GPU and host in practice; a GPU's share of the host's memory is similar

# Elements that a layer reads and writes per token, in widths (h): forward and backward, outside the split matrices
# (LayerNorms 6, residuals 11, gradients of biases 2) and inside (GELU 20, gradients of biases 7, heads put together 2,
# gradients of q, k, v: sums in float32 6, put together 6).
_OUTSIDE, _INSIDE = 19.0, 41.0
_OUTSIDE_AGAIN, _INSIDE_AGAIN = 6.0, 10.0  # recomputed: all of the forward pass but the last residual
_SLICES = 16.0  # sequence parallelism at b > 1: eight times, slices of samples are put in order
_KERNELS = {True: 15, False: 45}  # per layer, beside products and attention; compiled: neighbours are fused
_EAGER_LOGIT = 56  # bytes per logit: seven passes over float32 copies, forward and backward
_ADAMW = 40.0  # bytes per parameter: gradient norm 4, clipping 8, AdamW 28


def flops_per_token(model: ModelSettings) -> int:
    """Operations per token, forward and backward: 6 (N - wpe) + 12 L h s.

    Per weight two operations in the forward pass and four in the backward pass, plus attention's two products. This is
    the model's work, whatever the layout or kernel: vocabulary padding and recompute do not count, the masked half of
    attention does.
    """
    positions = model.seq_len * model.n_embd  # wpe is only looked up; wte is multiplied in the head
    return 6 * (model.parameters - positions) + 12 * model.n_layer * model.n_embd * model.seq_len


def busiest_traffic(workload: Workload, layout: Layout, machine: Machine) -> Traffic:
    """What a GPU of the pipeline rank with the most layers sends per step."""
    ranks = (held(workload.model, layout, rank) for rank in (layout.pipeline - 1, 0))
    return traffic(workload, layout, machine, max(ranks, key=lambda shards: shards.layers))


def speed_terms(workload: Workload, layout: Layout, machine: Machine) -> list[Term]:
    """The terms of a step's time that are not hidden behind each other; their sum is the time of the step."""
    model, gpu = workload.model, machine.gpu
    b, m, t, p, v = layout.micro_batch_size, layout.accumulation, layout.tensor, layout.pipeline, layout.virtual_stages
    h, e, rows, compiled = model.n_embd, workload.element, b * model.seq_len, workload.compiled
    flops, memory = PRODUCTS * machine.peak_flops(workload.precision), BANDWIDTH * gpu.memory_gb_per_s * 1e9

    def product(inner: float, columns: float) -> float:
        """(rows, inner) x (inner, columns): its operations, its three matrices, its start."""
        moved = rows * inner + inner * columns + rows * columns
        return 2 * rows * inner * columns / flops + e * moved / memory + _START

    # a layer and one micro-batch
    last_product = product(4 * h / t, h)
    products = product(h, 3 * h / t) + product(h / t, h) + product(h, 4 * h / t) + last_product
    attention_forward, attention_backward = attention_seconds(workload, layout, machine)
    attention = attention_forward + attention_backward
    width, split = e * rows * h / memory, 1 / t if layout.sequence_parallel else 1.0
    slices = _SLICES if layout.sequence_parallel and b > 1 else 0.0
    moves = width * (_OUTSIDE * split + _INSIDE / t + slices) + _START * _KERNELS[compiled]
    again = 0.0
    if layout.recompute != "none":
        again = width * (_OUTSIDE_AGAIN * split + _INSIDE_AGAIN / t) + _START * _KERNELS[compiled] / 3
    if layout.recompute == "full":
        # nothing in the backward pass needs the result of the last product, unless eager dropout follows
        again += products - (0 if model.dropout and not compiled else last_product) + attention_forward

    # the rank with the most work
    head = 3 * product(h, columns := padded_vocab_size(model.vocab_size, t) // t)
    head += (4 * e if compiled or machine.device == "cpu" else _EAGER_LOGIT) * rows * columns / memory
    first, last = held(model, layout, 0), held(model, layout, p - 1)
    computed = 3 * products + attention + moves + again
    has_head = last.layers * computed + head >= first.layers * computed
    shards = last if has_head else first
    sent = traffic(workload, layout, machine, shards)
    sums = 0.0
    if t > 1:
        sums = sent.tensor / sent.tensor_ranks.bandwidth
        sums += 2 * m * shards.layers * sums_per_layer(layout) * sent.tensor_ranks.latency
    hop = sent.pipeline / m / sent.pipeline_ranks.bandwidth
    weights = _weights_bytes(layout, shards.total, e) / memory / m
    of_layer = computed + sums / m / shards.layers
    waited = (model.n_layer - shards.layers) * of_layer + (p - 1) * (hop + weights)
    busy = shards.layers * of_layer + head * has_head + weights  # seconds of a micro-batch

    layers = m * shards.layers
    terms = [
        Term("matrix products", 3 * layers * products, "of layers, forward and backward",
             "3 m l sum(2 r k c / R + e (r k + k c + r c) / W + start), r = b s"),
        Term("attention", layers * attention, "the causal half of the scores",
             "m l (a / t) b s^2 / 2 (14 (h / a) / R + 100 / F)"),
        Term("memory traffic", layers * moves, "LayerNorm, GELU, residuals",
             "m l (19 + 41 / t) e b s h / W; 19 / t with sequence parallelism"),
        Term("memory traffic", m * weights, "weights rounded, gradients accumulated",
             "n (12 m - 6) / W; d > 1: n (10 m + 2 + 4 gathers + 8 scatters) / W"),
        Term("logits and loss", m * head * has_head, "head and cross-entropy",
             "3 m product(b s, h, V / t) + 4 e m b s V / (t W)"),
        Term("recompute", layers * again, layout.recompute,
             "selective: (6 + 10 / t) passes; full: and the layer's forward products and attention"),
        Term("tensor-parallel communication", sums, "sums of activations", "m 4 l 2 (t - 1) / t e b s h / N"),
        Term("pipeline bubble", waited / v, "one micro-batch on the other ranks",
             "(p - 1) / v (time of a micro-batch on a rank)"),
        Term("pipeline communication", m * hop, "activations and their gradients", "2 m v e b s h / N"),
        *_data_parallel(layout, sent, busy / 3),
        *_update(layout, shards, memory),
    ]  # fmt: skip
    return [term for term in terms if term.value]


def attention_seconds(workload: Workload, layout: Layout, machine: Machine) -> tuple[float, float]:
    """Attention of a layer and a micro-batch, forward and backward: the causal half, two products and five.

    Dao 2023, FlashAttention-2.
    """
    model = workload.model
    head_size = model.n_embd // model.n_head
    scores = layout.micro_batch_size * (model.n_head / layout.tensor) * model.seq_len**2 / 2
    flops = PRODUCTS * machine.peak_flops(workload.precision)
    vector = (_SCORE + _SCORE_DROPOUT * (model.dropout > 0)) / (machine.gpu.float32_tflops * 1e12)
    forward = scores * (4 * head_size / flops + vector / 3) + _START
    return forward, scores * (10 * head_size / flops + vector * 2 / 3) + _START


def _weights_bytes(layout: Layout, parameters: int, element: int) -> float:
    """Bytes that a step moves to round weights, once (6 per parameter), and to accumulate their gradients (12).

    Data parallelism casts weights once, adds gradients in the type of the products (10), and copies what is gathered
    (4) and scattered (8) into and out of buffers.
    """
    m = layout.accumulation
    if layout.data == 1:
        return parameters * (12 * (m - 1) + (6 if element == 2 else 0))
    gathers, scatters = rounds(layout)
    return parameters * ((10 * m + 2 if element == 2 else 12 * (m - 1)) + 4 * gathers + 8 * scatters)


def _data_parallel(layout: Layout, sent: Traffic, third: float) -> list[Term]:
    """What computation does not hide; `third`: seconds of a micro-batch's forward pass, half of its backward pass."""
    gathers, scatters = rounds(layout)

    def exposed(sent_bytes: float, window: float) -> float:
        seconds = sent_bytes / sent.data_ranks.bandwidth
        return seconds - (1 - _HIDDEN) * min(seconds, window)

    windows = third * gathers * (1.5 if gathers == 2 * layout.accumulation else 1)  # with ZeRO 3 in both passes
    return [
        Term("data-parallel communication", exposed(sent.gradients, 2 * third * scatters), "gradients",
             "4 n (d - 1) / (d N), twice for ZeRO 0, m times from ZeRO 2 on; less what the backward pass hides"),
        Term("data-parallel communication", exposed(sent.gathers, windows), "parameters",
             "e n (d - 1) / (d N), 2 m times for ZeRO 3; less what computation hides"),
    ]  # fmt: skip


def _update(layout: Layout, shards: Shards, memory: float) -> list[Term]:
    """The optimiser; offloaded, shards cross the host's link in float32, and AdamW runs in the host's memory."""
    parameters = shards.total / (layout.data if layout.zero_stage else 1)
    if not layout.offload:
        return [Term("optimizer", _ADAMW * parameters / memory, "norm, clipping, AdamW", "40 n / W; / d from ZeRO 1")]
    crossed = 4 * parameters * sum(rounds(layout)) / _HOST_LINK
    return [
        Term("optimizer", _ADAMW * parameters / _HOST_LINK, "norm, clipping, AdamW on the host", "40 n / d / 25 GB/s"),
        Term("offload", crossed, "shards to and from the host", "4 n / d (gathers + scatters) / 25 GB/s"),
    ]
