"""Reads rank, world size and job id from the launcher's environment.

In this order: submitit's local executor, Slurm (srun, which submitit's Slurm executor uses too),
torchrun, a single process. A torchrun inside a Slurm job wins: Slurm's variables describe that
torchrun, not its processes.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from common.console import say
from common.errors import ConfigError
from common.settings import ParallelSettings

STARTING = "starting: "
"""Begins the line in rank 0's log that says what a start does next."""


@dataclass(frozen=True)
class Launch:
    """This process in its job, from the launcher's environment."""

    launcher: str  # submitit, slurm, torchrun or single
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # processes on this node (the largest number on any node)
    nodes: int
    key: str  # differs between two jobs, and between two starts of the same job


SINGLE = Launch("single", 0, 1, 0, 1, 1, "single")


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """This process's rank and job, from its environment."""
    if env.get("SUBMITIT_EXECUTOR") == "local":
        size = int(env["SUBMITIT_LOCAL_NTASKS"])  # all on this machine
        rank, local_rank = int(env["SUBMITIT_LOCAL_GLOBALID"]), int(env["SUBMITIT_LOCAL_LOCALID"])
        return Launch("submitit", rank, size, local_rank, size, 1, f"local-{env['SUBMITIT_LOCAL_JOB_ID']}")
    under_torchrun = "TORCHELASTIC_RUN_ID" in env
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and not under_torchrun:
        # SLURM_STEP_*: the batch script sees SLURM_PROCID too, but it is one process, not a task
        size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1)))
        nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", 1)))
        key = f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}-{env.get('SLURM_RESTART_COUNT', '0')}"
        rank, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
        return Launch("slurm", rank, size, local_rank, -(-size // nodes), nodes, key)
    if "RANK" in env and "WORLD_SIZE" in env:
        size = int(env["WORLD_SIZE"])
        local_size = int(env.get("LOCAL_WORLD_SIZE", size))
        rank, local_rank = int(env["RANK"]), int(env.get("LOCAL_RANK", 0))
        start = "-".join(env.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        return Launch("torchrun", rank, size, local_rank, local_size, -(-size // local_size), f"torchrun-{start}")
    return SINGLE


def node_name() -> str:
    """The name of this node: Slurm's, which people use to exclude a node, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def starting(rank: int, what: str) -> None:
    """Say on rank 0 what this start does next; whoever waits for the job sees it at once."""
    if rank == 0:
        say(f"{STARTING}{what}")


def check_layout(launch: Launch, parallel: ParallelSettings, model: str) -> None:
    """Raises ConfigError if the layout needs another number of processes, or a GPU to offload."""
    if parallel.world_size and launch.world_size != parallel.world_size:  # 0: `auto` takes what was started
        raise ConfigError(
            f"models.{model}.parallel: {parallel.factors}, but {launch.world_size} were started; "
            f"start {parallel.world_size} (python -m cluster.submit does) or change these keys"
        )
    if parallel.offload:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"models.{model}.parallel.offload spares the memory of GPUs, and there is none here; set it to false"
            )
