"""Activation recompute: what a layer keeps for its backward pass, and what it computes anew (Chen et al. 2016)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_KEPT = frozenset(
    {  # results of matrix products and attention: most of the work, little of the memory
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)


def _policy(_context: object, operator: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(block: nn.Module, kind: str) -> None:
    """Let a layer recompute, in place: `selective` all but the products above, `full` everything."""
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    once = block.forward

    def forward(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(once, *inputs, use_reentrant=False, **options)
        return out

    # the method, not a wrapper around the module: names of parameters stay as they are
    setattr(block, "forward", forward)  # noqa: B010
