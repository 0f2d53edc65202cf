"""Stand-in for machines.cpu_machine."""

from common.settings import GpuSettings
from training.planning.machines import GIB, Machine


def cpu_machine(processes: int, memory: int, flops: float) -> Machine:
    """A node without GPUs, whose memory (bytes) and speed (FLOP/s) its processes share."""
    share = GpuSettings(
        memory_gib=memory / processes / GIB,
        float32_tflops=flops / processes / 1e12,
        memory_gb_per_s=10,
        node_gb_per_s=5,
        network_gb_per_s=1,
    )
    return Machine("cpu", memory // processes, share, processes)
