"""Data parallelism with the ZeRO stages 0 to 3 (Rajbhandari et al. 2020), by PyTorch's `replicate` and `fully_shard`.

| stage | each rank keeps | how |
|---|---|---|
| 0 | everything | `replicate`: gradients are all-reduced at the last micro-batch |
| 1 | its part of the optimiser's state | `fully_shard`: gathers parameters once a step, scatters gradients once |
| 2 | and of the gradients | scatters them at every micro-batch |
| 3 | and of the parameters | and gathers them anew for every forward and backward pass |

With pipeline parallelism PyTorch scatters gradients at the last micro-batch alone: stage 2 is stage 1 there.
"""

import warnings

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from common.settings import ParallelSettings


def apply_data_parallel(
    stage: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, parallel: ParallelSettings
) -> None:
    """Apply the layout's ZeRO stage to a pipeline stage in place: each block a group of its own, then the rest."""
    # The logits are a view (a 3-D linear is a 2-D one, reshaped); nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*blocks, stage):  # groups of their own: their communication overlaps with computing
        if parallel.zero_stage == 0:
            replicate(module, mesh=mesh)
        else:
            offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
            again = parallel.zero_stage == 3 and module is not stage
            fully_shard(module, mesh=mesh, reshard_after_forward=again, offload_policy=offload)


def before_backward(stage: nn.Module, last: bool, zero_stage: int) -> None:
    """Say what the coming backward pass, of the step's `last` micro-batch or not, does with gradients and parameters.

    Without a pipeline only, whose schedules do this themselves.
    """
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or zero_stage >= 2)
        stage.set_is_last_backward(last)
        if zero_stage in (1, 2):
            stage.set_reshard_after_backward(last)


def reshard(stage: nn.Module) -> None:
    """Keep no more than this rank's part of the parameters: after forward passes that no backward pass followed."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
