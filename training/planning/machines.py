"""The machine of a plan: GPUs of a named kind, the GPUs that torch sees, or CPUs.

    h100s = machine("h100", settings.cluster.gpus, per_node=8)
    laptop = this_cpu(processes=2, threads=1)
    nodes = machine_of_job(experiment, cluster)      # None: only the job can know it

machines.yaml has the known kinds; `cluster.gpus` adds others or replaces them.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import yaml

from common.errors import ConfigError
from common.settings import ClusterSettings, Experiment, GpuSettings, closest
from common.workers import available_cpus

GIB = 2**30
UNKNOWN = "unknown"
"""Name of a GPU whose memory is known, but not its kind and speed."""
_USUAL_CORE = 5e10  # FLOP/s in float32; only the order of layouts depends on it
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
        """Whether times are predicted; on CPUs (off by -59 to +537 %) they only rank layouts."""
        return self.device == "cuda" and self.name != UNKNOWN

    @property
    def precision(self) -> str:
        """The precision that `auto` selects."""
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


def gpu_of_device(device_name: str, own: Mapping[str, GpuSettings]) -> tuple[str, GpuSettings] | None:
    """The kind of a device by its driver's name; None if unknown. `own` kinds come first."""
    if " MIG " in device_name:  # a slice of a GPU
        return None
    for name, gpu in {**own, **known_gpus(), **own}.items():
        if any(re.search(pattern, device_name) for pattern in gpu.device_names):
            return name, gpu
    return None


def machine(name: str, own: Mapping[str, GpuSettings], per_node: int = 0) -> Machine:
    """Nodes of `per_node` GPUs of a kind; 0: its usual number. `own`: kinds of the configuration.

    Raises ConfigError that names the closest kind.
    """
    kinds = {**known_gpus(), **own}
    if name not in kinds:
        alike = " or ".join(repr(kind) for kind in kinds if kind.startswith(name.lower()))
        hint = f" (did you mean {alike}?)" if alike else closest(name, kinds)
        raise ConfigError(f"no GPU kind {name!r}{hint}; known: {', '.join(kinds)}; describe another under cluster.gpus")
    gpu = kinds[name]
    return Machine(name, round(gpu.memory_gib * GIB), gpu, per_node or gpu.gpus_per_node)


def cpu_machine(processes: int, memory: int, flops: float) -> Machine:
    """A machine without GPUs; `memory` and float32 `flops` per second are of all processes."""
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


def processes_of(experiment: Experiment, cluster: ClusterSettings) -> int:
    """How many processes a job has: those of its layout; with `auto` as requested, or one node."""
    return experiment.world_size or cluster.gpus_per_node or cluster.tasks_per_node


def judges_this_machine(cluster: ClusterSettings) -> bool:
    """Whether jobs run on the CPUs of this machine."""
    return cluster.executor == "local" and not cluster.gpus_per_node


def machine_of_job(experiment: Experiment, cluster: ClusterSettings) -> Machine | None:
    """The machine that a job of this experiment will run on; None if only the job can know.

    Raises ConfigError if `cluster.gpu` is not a known kind.
    """
    if cluster.gpus_per_node:
        return machine(cluster.gpu, cluster.gpus, cluster.gpus_per_node) if cluster.gpu else None
    tasks = min(processes_of(experiment, cluster), cluster.tasks_per_node)
    if cluster.executor == "local":
        return this_cpu(tasks, cluster.cpus_per_task)
    memory = cluster.mem_gb_per_task * tasks * GIB  # Slurm's G
    return cpu_machine(tasks, memory, _USUAL_CORE * tasks * (cluster.cpus_per_task or 1)) if memory else None


def this_cpu(processes: int, threads: int = 0) -> Machine:
    """This machine's CPUs, shared by processes of `threads` each; 0: equal shares of all cores."""
    granted = int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)  # srun may restrict this process to its own cores
    cores = max(available_cpus(), granted)
    used = min(cores, processes * threads) if threads else cores
    return cpu_machine(processes, available_memory(), _USUAL_CORE * used)


def this_gpu(device_name: str, memory: int, own: Mapping[str, GpuSettings], per_node: int) -> Machine:
    """GPUs as torch reports them; an unknown kind gets the rates of the most similar memory."""
    similar = min(known_gpus().values(), key=lambda gpu: abs(gpu.memory_gib * GIB - memory))
    name, gpu = gpu_of_device(device_name, own) or (UNKNOWN, similar)
    return Machine(name, memory, gpu, per_node)


def available_memory(env: Mapping[str, str] = os.environ) -> int:
    """Bytes that a job may use here: physical memory, or the limit of a control group or Slurm."""
    limits = [psutil.virtual_memory().total, *_cgroup_limits(), *_slurm_limits(env)]
    return min(limit for limit in limits if limit > 0)


def _cgroup_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """The limits of this process's control groups and their parents, of version 2 (`0::`) and 1."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            group = folder / path.lstrip("/")  # inside a container, only the parents may exist
            for parent in (group, *group.parents):
                if parent.is_relative_to(folder):
                    with suppress(OSError, ValueError):  # "max"
                        yield int((parent / name).read_text())


def _slurm_limits(env: Mapping[str, str]) -> Iterator[int]:
    """The memory that Slurm granted to this job on this node; 0 stands for all of it."""
    if "SLURM_JOB_ID" in env:
        per_node, per_cpu, cpus = (
            int(env.get(f"SLURM_{name}") or 0) for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
        )
        yield from (per_node << 20, per_cpu * cpus << 20)
