"""Activation recompute: trades memory for computing a layer's activations again in the backward pass.

Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_SAVED = frozenset(
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
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(block: nn.Module, kind: str) -> None:
    """Make a layer recompute its activations, in place: `selective` all except _SAVED, `full` everything."""
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    original = block.forward

    def forward(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(original, *inputs, use_reentrant=False, **options)
        return out

    # replaces the method instead of wrapping the module, which would rename the parameters
    setattr(block, "forward", forward)  # noqa: B010
