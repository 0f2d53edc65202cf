"""The machines of a training: the GPUs that the configuration names, a GPU that torch sees, or this machine's CPUs.

machine = machine_of_job(settings, "tiny")      # before a job is submitted; None: only the job can know
machine = this_cpu(processes=2, threads=1)
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from common.settings import ClusterSettings, Experiment, GpuSettings
from common.workers import available_cpus
from training.planning.machines import GIB, UNKNOWN, Machine, cpu_machine, gpu_of_device, known_gpus, machine

_USUAL_CORE = 5e10  # FLOP/s in float32; only the order of layouts depends on it


def processes_of(experiment: Experiment, cluster: ClusterSettings) -> int:
    """Processes of a job: as many as its layout has; with `auto`, as many as were asked for, or one node."""
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


def this_cpu(processes: int, threads: int = 0, env: Mapping[str, str] = os.environ) -> Machine:
    """This machine's CPUs, shared by the processes of a job with `threads` each; 0: an equal share of all cores."""
    cores = max(available_cpus(), int(env.get("SLURM_CPUS_ON_NODE") or 0))  # srun may grant a process its own alone
    used = min(cores, processes * threads) if threads else cores
    return cpu_machine(processes, available_memory(env), _USUAL_CORE * used)


def this_gpu(device_name: str, memory: int, own: Mapping[str, GpuSettings], per_node: int) -> Machine:
    """GPUs by the name and the bytes that torch reports; of no known kind, the one of the most similar memory."""
    known = gpu_of_device(device_name, own)
    similar = min(known_gpus().items(), key=lambda item: abs(item[1].memory_gib * GIB - memory))
    name = known[0] if known else similar[0]
    found = machine(name, own if known else {}, per_node, memory_bytes=memory)
    return found if known else replace(found, name=UNKNOWN)


def available_memory(env: Mapping[str, str] = os.environ) -> int:
    """Bytes that the processes of a job may use on this machine, whoever uses them now: the physical memory, or less if
    a control group or Slurm limits it."""
    limits = [psutil.virtual_memory().total, *_cgroup_limits(), *_slurm_limits(env)]
    return min(limit for limit in limits if limit > 0)


def _cgroup_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """The limits of this process's control groups and those above it, of version 2 (`0::PATH`) and 1."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            group = folder / path.lstrip("/")  # inside a container, only the parents may exist
            for place in (group, *group.parents):
                if place.is_relative_to(folder):
                    with suppress(OSError, ValueError):  # "max"
                        yield int((place / name).read_text())


def _slurm_limits(env: Mapping[str, str]) -> Iterator[int]:
    """What Slurm granted to this job on this node, in MB; 0 stands for all of it."""
    if "SLURM_JOB_ID" in env:
        with suppress(ValueError):
            yield int(env.get("SLURM_MEM_PER_NODE", "0")) << 20
        with suppress(ValueError):
            yield int(env.get("SLURM_MEM_PER_CPU", "0")) * int(env.get("SLURM_CPUS_ON_NODE", "0")) << 20
