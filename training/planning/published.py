"""The published estimates of a transformer's memory, beside which ours stand: docs/planning.md says where they differ.

Symbols: s tokens per sample, b samples per micro-batch, h width, a heads, L layers, V vocabulary, t tensor-parallel,
p pipeline-parallel and d data-parallel ranks, v stages per rank, m micro-batches. Activations have 2 bytes per element.
"""

from training.planning.layout import Layout
from training.planning.terms import Term
from training.planning.workload import Workload

KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models"
NARAYANAN = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters"
RAJBHANDARI = "Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
MEGATRON = "Megatron-LM, docs: Distributed Optimizer, theoretical memory savings"


def parameters(layers: int, width: int) -> int:
    """12 L h^2: parameters of all layers, without biases, LayerNorms and embeddings (Narayanan, section 3.1)."""
    return 12 * layers * width**2


def bytes_per_parameter(kind: str, data: int = 1) -> float:
    """Weights, gradients and Adam's state in mixed precision.

    `zero 0`: 16, of 2 and 2 bytes for weights and gradients and 12 for float32 weights and moments (Rajbhandari,
    section 3.1); ZeRO 1 divides the 12 by d, 2 also the gradients', 3 also the weights' (section 5). Megatron-LM sums
    gradients in float32: 20 in float16 (2 + 2, and 4 each for weight, gradient and two moments), 18 in bfloat16, where
    the gradient exists in float32 only, and 16 in float32; its `distributed` optimiser divides 16, 12 or 8 of them.
    """
    return {
        "zero 0": 16.0,
        "zero 1": 4 + 12 / data,
        "zero 2": 2 + 14 / data,
        "zero 3": 16 / data,
        "float16": 20.0,
        "bfloat16": 18.0,
        "float32": 16.0,
        "float16 distributed": 4 + 16 / data,
        "bfloat16 distributed": 6 + 12 / data,
        "float32 distributed": 8 + 8 / data,
    }[kind]


def layer_activations(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False) -> float:
    """Bytes that attention without a fused kernel saves per layer: s b h (34 + 5 a s / h) on one GPU.

    s b h (10 + 24 / t + 5 a s / (h t)) with t tensor-parallel ranks, and s b h (34 + 5 a s / h) / t with sequence
    parallelism (Korthikanti, section 4, table 2).
    """
    return flash_layer_activations(s, b, h, t, sequence_parallel) + 5 * b * s**2 * a / t


def flash_layer_activations(s: int, b: int, h: int, t: int = 1, sequence_parallel: bool = False) -> float:
    """Without the scores, as fused attention or selective recompute of it leaves them (Korthikanti, section 5)."""
    return s * b * h * (34 / t if sequence_parallel else 10 + 24 / t)


def full_recompute_activations(s: int, b: int, h: int) -> float:
    """2 s b h: the input of each layer (Korthikanti, table 2)."""
    return 2 * s * b * h


def head_activations(s: int, b: int, h: int, vocabulary: int, t: int = 1) -> float:
    """4 s b h (1 + V / h) / t: the last LayerNorm, the head's input, and float32 logits (Korthikanti, section 4.3)."""
    return 4 * s * b * h * (1 + vocabulary / h) / t


def in_flight(m: int, p: int, v: int = 1) -> float:
    """Micro-batches that the first rank of a 1F1B pipeline keeps: min(m, p), interleaved p (1 + (p - 1) / (p v)).

    Narayanan, section 2.2; Korthikanti, section 4.2.3.
    """
    return min(m, p) if v == 1 else p * (1 + (p - 1) / (p * v))


def published_terms(workload: Workload, layout: Layout) -> list[Term]:
    """What the published estimates say of a layout, in bytes on the first pipeline rank."""
    model, t, b = workload.model, layout.tensor, layout.micro_batch_size
    s, h, a = model.seq_len, model.n_embd, model.n_head
    per_parameter = bytes_per_parameter(f"zero {layout.zero_stage}", layout.data)
    states = per_parameter * model.parameters / (t * layout.pipeline)
    kept, formula = flash_layer_activations(s, b, h, t, layout.sequence_parallel), "k L s b h (10 + 24 / t)"
    if layout.sequence_parallel:
        formula = "k L 34 s b h / t"
    if layout.recompute == "full":
        kept, formula = full_recompute_activations(s, b, h), "k L 2 s b h"
    layers = model.n_layer / layout.pipeline
    flying = in_flight(layout.accumulation, layout.pipeline, layout.virtual_stages)
    scores = 0.0 if layout.recompute == "full" else 5 * b * s**2 * a / t
    head = head_activations(s, b, h, model.vocab_size, t) if layout.pipeline == 1 else 0.0
    zero = f"{per_parameter:g} P / (t p), of ZeRO {layout.zero_stage}"
    return [
        Term("model states", states, "weights, gradients, optimizer", zero, RAJBHANDARI),
        Term("activations", flying * layers * kept, "of all layers", formula, KORTHIKANTI),
        Term("scores", flying * layers * scores, "without fused attention", "k L 5 b s^2 a / t", KORTHIKANTI),
        Term("logits and loss", head, "last LayerNorm, head, float32 logits", "4 s b h (1 + V / h) / t", KORTHIKANTI),
    ]
