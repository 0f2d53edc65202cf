"""Floating-point operations per token.

A token costs 6 (N - wpe) + 12 L h s: per weight two operations in the forward pass and four in the backward pass, plus
attention's two products (Chowdhery et al. 2022, appendix B; nanoGPT counts the same). This counts the model's work,
whatever the layout or kernel: N excludes vocabulary padding, causal attention counts in full although half of it is
masked, and recomputed activations do not count (including them gives HFU).
"""

from common.settings import ModelSettings

CONVENTION = "6N+12Lhs"


def flops_per_token(model: ModelSettings) -> int:
    """Operations per token, forward and backward."""
    positions = model.seq_len * model.n_embd  # wpe is only looked up; wte is multiplied in the head
    return 6 * (model.parameters - positions) + 12 * model.n_layer * model.n_embd * model.seq_len
