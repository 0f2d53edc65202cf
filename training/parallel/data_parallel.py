"""Data parallelism with ZeRO stages 0 to 3 (Rajbhandari et al. 2020), by PyTorch's own modules.

| stage | each rank keeps | how |
|---|---|---|
| 0 | everything | `replicate`: all-reduces gradients at the last micro-batch |
| 1 | a shard of the optimiser state | `fully_shard`: gathers and scatters once per step |
| 2 | also a shard of the gradients | scatters gradients after every micro-batch |
| 3 | also a shard of the parameters | gathers parameters for every forward and backward pass |

With a pipeline PyTorch scatters gradients only after the last micro-batch: stage 2 acts like 1.
"""

import warnings

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from common.settings import ParallelSettings


def apply_data_parallel(
    stage: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, parallel: ParallelSettings, dtype: torch.dtype
) -> None:
    """Apply the ZeRO stage to a pipeline stage in place: a group per block, and one for the rest.

    Parameters are gathered in `dtype`, that of the products: half the traffic in bfloat16, and no
    cast copies that would stay alive until the backward pass. Gradients are summed in float32.
    """
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    # The logits are a view (a 3-D linear is a reshaped 2-D one) that nothing changes in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*blocks, stage):  # one group each, so that communication overlaps with computation
        if parallel.zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy)
        else:
            offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
            reshards = parallel.zero_stage == 3 and module is not stage
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, offload_policy=offload)


def before_backward(stage: nn.Module, last: bool, zero_stage: int) -> None:
    """Set what the next backward pass does; `last`: it is of the step's last micro-batch.

    Only without a pipeline: pipeline schedules do this themselves.
    """
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or zero_stage >= 2)
        stage.set_is_last_backward(last)
        if zero_stage < 3:
            stage.set_reshard_after_backward(last)


def reshard(stage: nn.Module) -> None:
    """Free the gathered parameters, after forward passes without a backward pass."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
