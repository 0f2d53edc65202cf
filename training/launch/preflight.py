"""Checks every node of a job before its first step, prints a table, and names a bad node.

preflight(world, mesh, folder, model)          # in a job; raises JobError
run_preflight(settings, "gpt2_345m")           # a job of its own: python -m cluster.preflight

node   device          threads  memory free      disk free
node1  8 x H100 80GB   8 of 64  78.9 of 79.1 GB  812.3 GB
node2  8 x H100 80GB   8 of 64  78.9 of 79.1 GB  812.3 GB
"""

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from common.console import say, text_table, warn
from common.errors import JobError
from common.settings import ModelSettings, ParallelSettings, Settings
from common.workers import available_cpus
from training.launch.process_group import World, joined
from training.launch.rank import check_layout, node_name, read_launch
from training.parallel.collectives import all_gather, run_on_rank0

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Report:
    """One rank's report on its node; sizes in bytes."""

    rank: int
    node: str
    device: str
    threads: int
    cores: int
    memory_free: int
    memory_total: int
    disk_free: int | None = None  # None: the file system does not say
    problem: str = ""  # why the model folder cannot be used from here


def preflight(world: World, mesh: "DeviceMesh | None", folder: Path, model: ModelSettings) -> None:
    """Check all nodes and print the table (a collective call).

    Raises JobError on all ranks if a node cannot write to the model folder, or has less space there
    than a checkpoint of the model needs. Unequal nodes are warnings.
    """
    import torch
    import torch.distributed as dist

    needed = 4 * 3 * model.parameters  # float32 weights and AdamW's two moments
    reports = all_gather(_inspect(world, folder))
    run_on_rank0(lambda: _check(reports, folder, needed), world.rank)
    if mesh is not None:  # a broken network fails here, not in a step
        for axis in mesh.mesh_dim_names or ():
            dist.all_reduce(torch.zeros(1, device=world.device), group=mesh.get_group(axis))


def _inspect(world: World, folder: Path) -> Report:
    """This rank's report on its node."""
    import torch

    device, memory = "CPU", psutil.virtual_memory()
    free, total = memory.available, memory.total
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
        free, total = torch.cuda.mem_get_info(world.device)
    report = Report(world.rank, node_name(), device, torch.get_num_threads(), available_cpus(), free, total)
    own = folder / f"preflight-{world.launch.key}-{world.rank}"
    try:
        usage = os.statvfs(folder)
        report.disk_free = usage.f_bavail * usage.f_frsize if usage.f_blocks else None
        own.touch()
        own.unlink()
    except OSError as error:
        report.problem = f"cannot write there: {error.strerror}"
    return report


# ------------------------------------------------------------------------------- rank 0's checks


def _check(reports: Sequence[Report], folder: Path, needed: int) -> None:
    """Print the table and the warnings. Raises JobError for a node that cannot run the job."""
    say(f"preflight\n{describe(reports)}")
    for warning in find_warnings(reports):
        warn(warning)
    if error := find_error(reports, folder, needed):
        raise JobError(error)


def _by_node(reports: Sequence[Report]) -> Mapping[str, list[Report]]:
    nodes = defaultdict[str, list[Report]](list)
    for report in reports:
        nodes[report.node].append(report)
    return nodes


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.1f} GB"


def describe(reports: Sequence[Report]) -> str:
    """The table: one row per node, with the lowest values of its ranks."""
    rows = [("node", "device", "threads", "memory free", "disk free")]
    for node, ranks in _by_node(reports).items():
        first, fullest = ranks[0], min(ranks, key=lambda report: report.memory_free)
        disk = min((report.disk_free for report in ranks if report.disk_free is not None), default=None)
        memory = f"{fullest.memory_free / 1e9:.1f} of {_gigabytes(fullest.memory_total)}"
        threads = f"{first.threads} of {first.cores}"
        rows.append((node, f"{len(ranks)} x {first.device}", threads, memory, _gigabytes(disk)))
    return text_table(rows)


def find_warnings(reports: Sequence[Report]) -> list[str]:
    """Differences between nodes, one line per kind and node; training continues."""
    warnings = []
    usual = Counter(report.device for report in reports).most_common(1)[0][0]
    free = median(report.memory_free for report in reports)
    for node, ranks in _by_node(reports).items():
        if other := next((report.device for report in ranks if report.device != usual), ""):
            warnings.append(f"{node}: device {other}, elsewhere {usual}")
        if (worst := min(report.memory_free for report in ranks)) < free / 2:
            warnings.append(f"{node}: {_gigabytes(worst)} of memory free, elsewhere {_gigabytes(free)}")
        if ranks[0].threads > ranks[0].cores:
            warnings.append(f"{node}: {ranks[0].threads} threads per process on {ranks[0].cores} cores")
    return warnings


def find_error(reports: Sequence[Report], folder: Path, needed: int) -> str:
    """Why the job cannot run, on the first node with a problem; empty if it can."""
    for report in reports:
        problem = report.problem
        if not problem and report.disk_free is not None and report.disk_free < needed:
            free, size = f"{report.disk_free / 1e9:.3f} GB", f"{needed / 1e9:.3f} GB"
            problem = f"{free} free, a checkpoint has {size}; free space, or change `run`"
        if problem:
            return f"preflight: {report.node}: {folder}: {problem}"
    return ""


# ------------------------------------------------------------------------------- a job of its own


def run_preflight(settings: Settings, name: str) -> int:
    """Check the nodes of this job for the model `name`, without its data; returns the exit code.

    Every process of the job calls this.
    """
    launch, folder = read_launch(), settings.model_folder(name)
    experiment = settings.experiment(name)
    check = partial(check_layout, launch, experiment.parallel, name)
    with joined(launch, folder, settings.cluster, check) as (world, _):
        from training.parallel.layout import make_mesh

        parallel = ParallelSettings(data=world.size) if experiment.parallel.auto else experiment.parallel
        mesh = make_mesh(parallel, world.device.type)
        preflight(world, mesh, folder, experiment.model)
    return 0
