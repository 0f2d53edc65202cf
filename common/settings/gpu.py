"""What the planner knows of a kind of GPU."""

from typing import Annotated

from pydantic import Field

from common.settings.section import PositiveFloat, PositiveInt, Section

_Rate = Annotated[float, Field(ge=0)]


class GpuSettings(Section):
    """A kind of GPU, and the links of its usual node. Peaks are dense: the larger figures of data sheets are not."""

    memory_gib: PositiveFloat
    """Memory that PyTorch reports (total_memory), in GiB; somewhat less than the product's name says."""
    bfloat16_tflops: _Rate = 0
    """Peak of bfloat16 matrix products in TFLOP/s. 0: no bfloat16, so that precision auto is float32."""
    float16_tflops: _Rate = 0
    """Peak of float16 matrix products in TFLOP/s. 0: as bfloat16."""
    tf32_tflops: _Rate = 0
    """Peak of TF32 matrix products in TFLOP/s. 0: no TF32."""
    float32_tflops: PositiveFloat
    """Peak of float32 matrix products in TFLOP/s."""
    memory_gb_per_s: PositiveFloat
    """Bandwidth of its memory, in GB/s."""
    node_gb_per_s: PositiveFloat
    """What one GPU sends to the others of its node, in GB/s: half of NVLink's figure for both directions, or PCIe's."""
    network_gb_per_s: PositiveFloat
    """Each GPU's share of what its node sends to other nodes, in GB/s."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a usual node."""
    device_names: list[str] = []
    """Regular expressions for the name that the driver reports; the first kind that matches counts."""
    source: str = ""
    """Where the figures are from."""
