"""The moments that each optimiser keeps of a tensor, and their names in files. Needs no torch.

Both optimisers call the moving average of the gradients `exp_avg`; to Muon it is the momentum.
"""

from collections.abc import Mapping

from training.tensors import Leaf

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("exp_avg",)
NAMES: Mapping[str, str] = {
    "exp_avg": "exp_avg",  # AdamW: ours, Megatron-core's, DeepSpeed's; Muon: ours
    "exp_avg_sq": "exp_avg_sq",  # AdamW: everywhere
    "momentum_buffer": "exp_avg",  # Muon: Megatron-core's, which averages gradients with the same weights
}
"""Our name of a moment, by its names in the files of all formats that are read."""


def moments_of(leaf: Leaf, optimizer: str) -> tuple[str, ...]:
    """The moments of a tensor; Muon updates the matrices of the layers, AdamW the rest."""
    return MUON if optimizer == "muon" and leaf.conv1d else ADAMW
