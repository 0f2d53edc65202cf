"""Checks every node of a job before its first step, prints one table, and names the node where something is wrong.

    preflight(world, mesh, experiment, folder)     # in a job; raises JobError
    run_preflight(settings, "gpt2_345m")           # a job of its own: python -m cluster.preflight

Each rank measures its device, memory, disk, clock and all-reduces, and reports to rank 0 through the store, so that a
rank that does not answer is named, too. Rank 0 prints one row per node, with the worst of its ranks.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from common.console import say, warn
from common.errors import ConfigError, JobError, LostRankError
from common.files import write_text
from common.settings import Experiment, ParallelSettings, Settings
from common.workers import available_cpus
from training.parallel.launch import check_world_size, node_name, read_launch
from training.parallel.network import check_interface
from training.parallel.node_report import Report, describe, find_error, find_warnings
from training.parallel.process_group import World, before_start, exit_code, started
from training.parallel.rendezvous import remove_stale

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_PATIENCE = 60.0  # seconds to wait for a rank's answer
_VISIBLE = 5.0  # seconds until a file must be seen on another node: network file systems cache folders
_PROBE = 4 << 20  # bytes of the file that measures the write speed
_REDUCED = {"cpu": 1 << 18, "cuda": 1 << 26}  # bytes of an all-reduce
_FLOATS = 3  # per parameter in a checkpoint: the weight and AdamW's two moments


def preflight(world: World, mesh: "DeviceMesh | None", experiment: Experiment, folder: Path) -> None:
    """Check all nodes and print the table (a collective call).

    Raises JobError on all ranks if a node does not see the model folder, cannot write to it, or has no space for a
    checkpoint. Slow parts, wrong clocks and unequal nodes are warnings.
    """
    shared = folder / f"preflight-{world.job}"
    if world.rank == 0:
        remove_stale(folder, "preflight-*")
        write_text(shared, world.job)
    try:
        _arrive(world, "written")  # the file is there, and all ranks are here
        report = _look(world, folder, shared)
        report.skew = _clock_skew(world)
        report.reduced = _time_all_reduces(mesh, world.device)
        reports = _gather(world, report)
    finally:
        if world.rank == 0:
            shared.unlink(missing_ok=True)
    error = ""
    if reports:
        say(f"preflight\n{describe(reports)}")
        for warning in find_warnings(reports):
            warn(warning)
        error = find_error(reports, folder, checkpoint_bytes(experiment))
    error = _from_rank0(world, "error", error)
    if world.store is not None:
        world.store.set(f"preflight/end/{world.rank}", "")
        _await(world, "end")  # the store ends with rank 0
    if error:
        raise JobError(error)


# --------------------------------------------------------------------------------------------- exchange with rank 0


def _arrive(world: World, name: str) -> float:
    """Wait for all ranks; returns rank 0's clock at a moment when all of them waited. Names a rank that is missing."""
    if world.store is None:
        return time.time()
    world.store.set(f"preflight/{name}/{world.rank}", "")
    _await(world, name)
    return float(_from_rank0(world, name, repr(time.time())))


def _await(world: World, name: str) -> None:
    """On rank 0: wait until each rank has set preflight/NAME/RANK. Raises LostRankError that names one that did not."""
    if world.rank != 0 or world.store is None:
        return
    keys = [f"preflight/{name}/{rank}" for rank in range(world.size)]
    deadline = time.monotonic() + _PATIENCE
    while not world.store.check(keys):  # its wait() would print a warning of its own
        time.sleep(0.005)
        if time.monotonic() < deadline:
            continue
        missing = next((rank for rank, key in enumerate(keys) if not world.store.check([key])), 0)
        node = world.store.get(f"here/{missing}").decode()
        raise LostRankError(
            f"preflight: rank {missing} on {node} has not answered for {_PATIENCE:.0f} s; its log or its heartbeat "
            "may say why"
        )


def _from_rank0(world: World, name: str, value: str) -> str:
    """Rank 0's `value`, on all ranks."""
    if world.store is None:
        return value
    if world.rank == 0:
        world.store.set(f"preflight/{name}", value)
    return world.store.get(f"preflight/{name}").decode()


def _gather(world: World, report: Report) -> list[Report]:
    """All reports on rank 0, nothing elsewhere."""
    if world.store is None:
        return [report]
    world.store.set(f"preflight/report/{world.rank}", json.dumps(asdict(report)))
    _await(world, "report")
    if world.rank != 0:
        return []
    texts = world.store.multi_get([f"preflight/report/{rank}" for rank in range(world.size)])
    return [Report(**json.loads(text)) for text in texts]


# ----------------------------------------------------------------------------------------------------- measurements


def _look(world: World, folder: Path, shared: Path) -> Report:
    """What this rank sees of its node."""
    import torch

    launch = read_launch()
    device, driver = "CPU", "-"
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    if world.device.type == "cuda":
        device, driver = torch.cuda.get_device_name(world.device), _driver()
        free, total = torch.cuda.mem_get_info(world.device)
    report = Report(world.rank, node_name(), device, driver, torch.get_num_threads(), available_cpus(), free, total)
    if not _is_visible(shared, world.job):
        report.problem = "does not see the file that rank 0 wrote"
        return report
    try:
        usage = os.statvfs(folder)
        report.disk_free = usage.f_bavail * usage.f_frsize if usage.f_blocks else None
        if launch.local_rank == 0:
            report.write_speed = _write_speed(shared.with_name(f"{shared.name}-{world.rank}"))
    except OSError as error:
        report.problem = f"cannot write there: {error.strerror}"
    return report


def _driver() -> str:
    """The version of NVIDIA's kernel module."""
    with suppress(OSError, IndexError):
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("Kernel Module")[1].split()
        return next(word for word in words if word[0].isdigit())
    return "-"


def _is_visible(path: Path, text: str) -> bool:
    """Whether rank 0's file arrives here with its text."""
    deadline = time.monotonic() + _VISIBLE
    while True:
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _write_speed(path: Path) -> float:
    """Bytes per second with which a small file reaches the disk. Removes the file."""
    data = os.urandom(_PROBE)
    start = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        return _PROBE / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def _clock_skew(world: World) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's, as far as that is certain."""
    _arrive(world, "waiting")  # all ranks ask at the same time, so that the interval below is short
    before = time.time()
    theirs = _arrive(world, "clock")
    return max(0.0, before - theirs) + min(0.0, time.time() - theirs)


def _time_all_reduces(mesh: "DeviceMesh | None", device: "torch.device") -> dict[str, float]:
    """Seconds of the fastest of three all-reduces over each axis of the mesh that has several ranks."""
    import torch
    import torch.distributed as dist

    seconds = {}
    for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        assert mesh is not None
        if mesh[axis].size() == 1:
            continue
        numbers, times = torch.zeros(_REDUCED[device.type] // 4, device=device), []
        for _ in range(4):  # the first one connects
            start = time.perf_counter()
            dist.all_reduce(numbers, group=mesh.get_group(axis))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        seconds[axis] = min(times[1:])
    return seconds


def checkpoint_bytes(experiment: Experiment) -> int:
    """The size of one checkpoint, whatever the layout: float32 weights and two moments."""
    return 4 * _FLOATS * experiment.model.parameters


# ------------------------------------------------------------------------------------------------------- on its own


def run_preflight(settings: Settings, name: str) -> int:
    """Check the nodes of this job for the model `name`, without its data; returns the exit code.

    Every process of the job calls this. Raises ToolkitError for what a person has to cure.
    """
    launch, folder = read_launch(), settings.model_folder(name)
    with before_start(launch, folder):
        try:
            experiment = settings.experiment(name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        check_world_size(launch, experiment.parallel, name)
        check_interface(settings.cluster.interface)
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with started(launch, folder, settings.cluster) as world:
            from training.parallel.layout import make_mesh

            parallel = ParallelSettings(data=world.size) if experiment.parallel.auto else experiment.parallel
            preflight(world, make_mesh(parallel, world.device.type), experiment, folder)
    except LostRankError as error:
        return exit_code(error)
    return 0
