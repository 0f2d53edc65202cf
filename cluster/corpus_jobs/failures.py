"""Why a shard or task failed: shard, node, disk or nobody, and the message."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from cluster.corpus_jobs.batches import Request, Task
from cluster.corpus_jobs.dag_jobs import ShardJob, time_limit

LOST_TASKS = 3
"""How many tasks a shard may lose through no fault of its own before it fails.

If they ended before they started any shard, each was on another node, because a node where that
happens is left out from then on (`blames_node`). Three such nodes share a fault, such as `setup` or
the Python: to find that out takes three rounds, however large the cluster is. If a shard of the
same rule has started elsewhere, it is the nodes' own fault, and others are tried until none is
left.
"""
_TIME_LIMITS = 100  # jobs of a resumable shard that may reach their time limit before it fails
_LOST = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED"})  # neither the shard nor `setup` is to blame
_TIMED_OUT = frozenset({"TIMEOUT", "DEADLINE"})
_PROBE = 1 << 20  # bytes; what is left of a full disk may have room for a few small files


def blames_node(task: Task, state: str) -> bool:
    """Whether the node of a task that ended in a state of Slurm's must be left out from now on.

    A node that fails at once, before the first shard, is free at once: Slurm gives it every task
    that is tried again.
    """
    return not task.started and bool(task.node) and state not in _LOST


def why_avoided(task: Task, end: str) -> str:
    """What to say when the node of a task is left out; `end`: how the task ended."""
    key = "cluster.sbatch" if task.request.gpus else "cluster.corpus.sbatch"
    return (
        f"{end} before it started any shard. Nothing more is submitted to {task.node} in this run; "
        f"{key}: [--exclude={task.node}] excludes it for good{last_lines(task.log)}"
    )


def shard_failure(result: dict[str, Any], request: Request, trouble: str) -> str:
    """Why a shard's command failed; `trouble`: that of its disk."""
    code, memory = result["exit"], request.mem_mb
    why = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        limit = f", perhaps because it needed more than mem_mb={memory}" if memory else ""
        why = f"killed (SIGKILL){limit}; its largest process had {result['max_rss_mb']} MB"
    return f"{why}; {trouble}" if trouble else why


def task_end(task: Task, state: str) -> str:
    """How a task ended early, to begin a message."""
    on_node = f" on {task.node}" if task.node else ""
    return f"Slurm's job {task.job}{on_node} ended ({state or 'unknown to Slurm by now'})"


def final(task: Task, items: Iterable[ShardJob], state: str) -> str:
    """Why the jobs of a task that ended early are not tried again; empty if they may be."""
    return "somebody cancelled it" if state == "CANCELLED" else disk_trouble(task, items)


def blames_shard(item: ShardJob, number: int, task: Task, state: str, works: bool) -> bool:
    """Whether a task that ended early makes one of its shards fail; counts it for the shard.

    `works`: a shard of its rule has started somewhere.
    """
    if not task.started:
        item.nodes.append(task.node or "an unknown node")
        return len(item.nodes) >= LOST_TASKS and not (works and len(item.nodes) == len({*item.nodes}))
    if number != task.running:
        return False
    item.lost += 1
    if state in _TIMED_OUT:
        return task.alone and not (item.job.resources.get("resumes") and item.lost <= _TIME_LIMITS)
    return state not in _LOST or item.lost > LOST_TASKS


def task_failure(item: ShardJob, task: Task, state: str) -> str:
    """Why a task that ended early made one of its shards fail."""
    end = task_end(task, state)
    if not task.started:
        return f"{end} before it started any shard, like those on {' and '.join(dict.fromkeys(item.nodes[:-1]))}"
    if state in _TIMED_OUT:
        return f"{end} at its limit of {task.request.minutes} minutes; raise {time_limit(item.shard.rule)}"
    return f"{end} at its limit of {task.request.mem_mb} MB" if state == "OUT_OF_MEMORY" else end


def disk_trouble(task: Task, items: Iterable[ShardJob]) -> str:
    """The system's error if a task and its jobs cannot write; empty if they can.

    It writes a file: only the file system knows whether space, inodes or a quota run out.
    """
    devices = set()
    for folder in (task.folder, *(Path(path).parent for item in items for path in item.job.output)):
        try:
            if (device := os.stat(folder).st_dev) not in devices:
                devices.add(device)
                with NamedTemporaryFile(dir=folder) as file:
                    file.write(bytes(_PROBE))
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            return f"{error.strerror}: {folder}"
    return ""


def last_lines(log: Path) -> str:
    """The last five lines of a task's log, for an error message; empty if there are none."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return "\n".join(["; the job printed:", *lines[-5:]]) if lines else ""
