"""Kinds of GPUs, and the machines that are planned for.

    h100s = machine("h100", settings.cluster.gpus, per_node=8)
    laptop = cpu_machine(processes=2, memory=16 * GIB, flops=200e9)

The kinds stand in machines.yaml beside this file; `cluster.gpus` adds others or replaces them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from common.errors import ConfigError
from common.settings import GpuSettings, closest

GIB = 2**30
UNKNOWN = "unknown"
"""The name of a GPU of no known kind: its memory is known, its speed is not."""
_CPU_MEMORY, _CPU_NODE, _CPU_NETWORK = 10, 5, 1  # GB/s per process: main memory, gloo on one machine, 10 Gb/s Ethernet


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs; a CPU process counts as one, with its share of the node."""

    name: str
    """The kind of GPU, or `cpu`."""
    memory: int
    """Bytes per GPU."""
    gpu: GpuSettings
    per_node: int
    """GPUs per node."""

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def timed(self) -> bool:
        """Whether times are predicted. On CPUs they were off by -59 to +537 %; there they only rank layouts."""
        return self.device == "cuda" and self.name != UNKNOWN

    @property
    def precision(self) -> str:
        """What `train.precision: auto` stands for."""
        return "bfloat16" if self.gpu.bfloat16_tflops else "float32"

    def peak_flops(self, precision: str) -> float:
        """Peak of matrix products in FLOP/s; float32 is IEEE's, never TF32."""
        gpu = self.gpu
        halves = {"bfloat16": gpu.bfloat16_tflops, "float16": gpu.float16_tflops or gpu.bfloat16_tflops}
        return 1e12 * (halves.get(precision) or gpu.float32_tflops)


@cache
def known_gpus() -> Mapping[str, GpuSettings]:
    """The kinds of machines.yaml, by name."""
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    return {name: GpuSettings.model_validate(values) for name, values in yaml.safe_load(text).items()}


def find_gpu(name: str, own: Mapping[str, GpuSettings]) -> GpuSettings:
    """A kind of GPU by its name; `own` are those of the configuration. Raises ConfigError that names the closest."""
    kinds = {**known_gpus(), **own}
    if name not in kinds:
        alike = " or ".join(repr(kind) for kind in kinds if kind.startswith(name.lower()))
        hint = f" (did you mean {alike}?)" if alike else closest(name, kinds)
        raise ConfigError(f"no GPU kind {name!r}{hint}; known: {', '.join(kinds)}; describe another under cluster.gpus")
    return kinds[name]


def gpu_of_device(device_name: str, own: Mapping[str, GpuSettings]) -> tuple[str, GpuSettings] | None:
    """The kind of a device by the name that its driver reports; None if it is not known.

    Kinds of the configuration, `own`, come first. Slices of a GPU (MIG) are not known.
    """
    if " MIG " in device_name:
        return None
    for name, gpu in {**own, **{name: gpu for name, gpu in known_gpus().items() if name not in own}}.items():
        if any(re.search(pattern, device_name) for pattern in gpu.device_names):
            return name, gpu
    return None


def machine(
    name: str,
    own: Mapping[str, GpuSettings],
    per_node: int = 0,
    memory_bytes: int | None = None,
    peak_tflops: float | None = None,
) -> Machine:
    """Nodes of `per_node` GPUs (0: as usual for the kind) of the kind `name`.

    `memory_bytes` and `peak_tflops`, that of half-precision products where the kind has them, replace the kind's. With
    both, `name` may be empty: everything else is then the known kind's with the nearest peak. Raises ConfigError.
    """
    if not name and not (memory_bytes and peak_tflops):
        raise ConfigError("no kind of GPU: give one with --gpu, or both --gpu-memory and --peak-tflops")
    gpu = find_gpu(name or _nearest(peak_tflops or 0), own)
    if peak_tflops:
        key = next((key for key in ("bfloat16_tflops", "float16_tflops") if getattr(gpu, key)), "float32_tflops")
        gpu = gpu.model_copy(update={key: peak_tflops})
    memory = memory_bytes or round(gpu.memory_gib * GIB)
    return Machine(name or "custom", memory, gpu, per_node or gpu.gpus_per_node)


def _nearest(peak_tflops: float) -> str:
    kinds = {name: gpu.bfloat16_tflops or gpu.float16_tflops for name, gpu in known_gpus().items()}
    return min(kinds, key=lambda name: max(kinds[name] / peak_tflops, peak_tflops / kinds[name]))


def cpu_machine(processes: int, memory: int, flops: float) -> Machine:
    """A machine without GPUs; `memory` (bytes) and `flops` (float32, per second) are of all processes together."""
    share = memory // processes
    gpu = GpuSettings(
        memory_gib=share / GIB,
        float32_tflops=flops / processes / 1e12,
        memory_gb_per_s=_CPU_MEMORY,
        node_gb_per_s=_CPU_NODE,
        network_gb_per_s=_CPU_NETWORK,
        gpus_per_node=processes,
        source="an assumed core, and bandwidths of a usual server",
    )
    return Machine("cpu", share, gpu, processes)
