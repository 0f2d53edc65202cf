"""Why a shard or a task has failed, in words that name the key to change, and whether the shard is to blame."""

from pathlib import Path
from typing import Any

from cluster.corpus_jobs.batches import Request, Task
from cluster.corpus_jobs.dag_jobs import ShardJob, resumes, time_limit

LOST_TASKS = 3  # tasks that a shard may lose, for their own reasons, before it fails
_TIME_LIMITS = 100  # jobs of a resumable shard that may reach their time limit before it fails
_LOST = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED"})  # the shard that ran is not to blame


def is_to_blame(item: ShardJob, task: Task, state: str) -> bool:
    """Whether the shard that ran when its task ended in a state of Slurm's counts as failed."""
    if state in ("TIMEOUT", "DEADLINE"):
        return task.alone and not (resumes(item.job) and item.lost <= _TIME_LIMITS)
    return state not in _LOST or item.lost > LOST_TASKS


def of_shard(result: dict[str, Any], request: Request) -> str:
    """Why a shard's command failed."""
    code, memory = result["exit"], request.mem_mb
    if code in (-9, 137):
        limit = f", perhaps because it needed more than mem_mb={memory}" if memory else ""
        return f"killed (SIGKILL){limit}; its largest process had {result['max_rss_mb']} MB"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def of_task(where: str, state: str, task: Task) -> str:
    """Why a task that ended in a state of Slurm's took its running shard with it."""
    if state in ("TIMEOUT", "DEADLINE"):
        key = time_limit(task.shards[task.running or 0].rule)
        return f"{where} at its limit of {task.request.minutes} minutes; raise {key}"
    return f"{where} at its limit of {task.request.mem_mb} MB" if state == "OUT_OF_MEMORY" else where


def last_words(log: Path) -> str:
    """The end of what a task and Slurm printed, for an error message; empty if that is nothing."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return "\n".join(["; the job printed:", *lines[-5:]]) if lines else ""
