"""Floating-point operations: of the model per token, and what a layout executes per step.

A token costs 6 (N - wpe) + 12 L h s: per weight two operations in the forward pass and four in the backward pass, plus
attention's two products (Chowdhery et al. 2022, appendix B; nanoGPT counts the same). This counts the model's work,
whatever the layout or kernel: N excludes vocabulary padding, causal attention counts in full although half of it is
masked, and recomputed activations do not count (including them gives HFU).

`executed_flops` counts everything that matrix products and attention compute, as PyTorch's FlopCounterMode does.
"""

from common.settings import ModelSettings
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout
from training.planning.workload import Workload

CONVENTION = "6N+12Lhs"


def flops_per_token(model: ModelSettings) -> int:
    """Operations per token, forward and backward."""
    positions = model.seq_len * model.n_embd  # wpe is only looked up; wte is multiplied in the head
    return 6 * (model.parameters - positions) + 12 * model.n_layer * model.n_embd * model.seq_len


def recomputed_squares(workload: Workload, layout: Layout) -> int:
    """Squares of the width, of a layer's 12, whose products the backward pass computes again.

    `selective` keeps all products, and so adds none. With `full`, nothing in the backward pass needs the result of the
    MLP's second product (4 squares); recomputation stops before it, unless eager dropout follows and keeps its mask.
    """
    if layout.recompute != "full":
        return 0
    return 12 if workload.model.dropout and not workload.compiled else 8


def executed_flops(workload: Workload, layout: Layout) -> int:
    """Operations of a step on all GPUs, recomputation and padding rows of the vocabulary included.

    Attention is a fused kernel, which keeps no scores: its backward pass has five products where the forward pass has
    two (Dao et al. 2022, algorithm 4). Its masked half counts, although kernels skip it.
    """
    model = workload.model
    square, scores = model.n_embd**2 * model.n_layer, model.n_embd * model.seq_len * model.n_layer
    head = padded_vocab_size(model.vocab_size, layout.tensor) * model.n_embd
    per_token = 6 * (12 * square + head) + (4 + 10) * scores
    if layout.recompute == "full":
        per_token += 2 * recomputed_squares(workload, layout) * square + 4 * scores
    return per_token * layout.global_batch_size * model.seq_len
