"""The moments that each optimiser keeps of a tensor; every checkpoint, plan and optimiser asks here. Needs no torch.

Both optimisers call the moving average of the gradients `exp_avg`; to Muon it is the momentum.
"""

from training.tensors import Leaf

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("exp_avg",)


def moments_of(leaf: Leaf, optimizer: str) -> tuple[str, ...]:
    """The moments of a tensor under `train.optimizer`; Muon updates the matrices of the layers, AdamW the rest."""
    return MUON if optimizer == "muon" and leaf.conv1d else ADAMW
