"""Kinds of GPUs, and the machines that are planned for.

    gpu = find_gpu("h100", settings.cluster.gpus)
    machine = Machine(gpu, per_node=8)

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
        raise ConfigError(
            f"no GPU kind {name!r}{closest(name, kinds)}; known: {', '.join(kinds)}; "
            "describe another under cluster.gpus"
        )
    return kinds[name]


def gpu_of_device(device_name: str, own: Mapping[str, GpuSettings]) -> tuple[str, GpuSettings] | None:
    """The kind of a device by the name that its driver reports; None if it is not known."""
    if " MIG " in device_name:
        return None
    for name, gpu in {**own, **known_gpus()}.items():
        if any(re.search(pattern, device_name) for pattern in gpu.device_names):
            return name, gpu
    return None


def machine(
    name: str,
    own: Mapping[str, GpuSettings],
    per_node: int,
    memory_bytes: int | None = None,
    peak_tflops: float | None = None,
) -> Machine:
    """GPUs of a kind. A stand-in."""
    gpu = find_gpu(name, own)
    return Machine(name, memory_bytes or int(gpu.memory_gib * GIB), gpu, per_node)


def cpu_machine(processes: int, memory: int, flops: float) -> Machine:
    """A machine's CPUs, shared by processes; bytes and FLOP/s of the whole machine. A stand-in."""
    gpu = GpuSettings(
        memory_gib=memory / processes / GIB,
        float32_tflops=flops / processes / 1e12,
        memory_gb_per_s=20,
        node_gb_per_s=5,
        network_gb_per_s=1,
    )
    return Machine("cpu", memory // processes, gpu, processes)
