"""Why a shard or a task has failed, in words that name the key to change."""

from pathlib import Path
from typing import Any

from cluster.corpus_jobs.batches import Request, Task, rule_key


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
    if state == "OUT_OF_MEMORY":
        return f"{where} at its limit of {task.request.mem_mb} MB"
    return where


def time_limit(rule: str) -> str:
    """The key of a rule's time limit."""
    return f"cluster.corpus.runtime_minutes.{rule_key(rule)}"


def last_words(log: Path) -> str:
    """The end of what a task and Slurm printed, for an error message; empty if that is nothing."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(["; the job printed:", *lines[-5:]]) if lines else ""
