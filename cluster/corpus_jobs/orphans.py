"""Decides about shards that a dead Snakemake has left in Slurm: adopted, cancelled or repeated.

A shard is adopted if its command and settings are what would be submitted now, and no input is newer than its
start. Its task then counts as one of this run: queued, running, or finished with success. Everything else is repeated,
but only when Slurm says that no task works on the shard any more; a task that works on something else is cancelled.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Task
from cluster.corpus_jobs.dag_jobs import ShardJob
from cluster.slurm import QueuedJob
from common import steps
from common.settings import Settings

Verdict = Literal["adopt", "cancel", "wait", "repeat"]


class OrphanedJobs:
    """The shards of earlier batches that this run needs."""

    def __init__(self, settings: Settings, needed: Iterable[Any]) -> None:
        """`needed`: the jobs of the DAG that will run."""
        self._settings = settings
        self._cancelled: set[Task] = set()
        self._shards: dict[str, tuple[Task, int]] = {}
        self.claimed: list[tuple[ShardJob, Task, int]] = []
        """Jobs that are ready and undecided."""
        if found := list(batches.recorded(settings.run)):
            keys = {batches.key_of(job.rule.name, job.output) for job in needed}
            every = ((shard.key, task, number) for task in found for number, shard in enumerate(task.shards))
            # of several batches with the same shard, the newest counts
            self._shards = {key: (task, number) for key, task, number in every if key in keys}
            for task, number in self._shards.values():
                task.waiting[number] = None

    def claims(self, item: ShardJob) -> bool:
        """Whether an earlier batch has this job, which is then added to `claimed`."""
        if item.again or item.shard.key not in self._shards:
            return False
        self.claimed.append((item, *self._shards.pop(item.shard.key)))
        return True

    def decide(self, item: ShardJob, task: Task, number: int, job: QueuedJob | None) -> Verdict:
        """Decide about a claimed job; `job` is its task in Slurm's queue."""
        task.read()
        same = item.shard == task.shards[number]
        inputs = [*item.job.input, *steps.read_by(item.job.rule.name, self._settings)]
        result = task.ended.get(number)
        if result is not None:
            valid = same and result["exit"] == 0 and all(os.path.exists(path) for path in item.job.output)
            return "adopt" if valid and _saw(inputs, task.started[number]) else "repeat"
        if job is None or not job.active:
            if not task.job:
                # Snakemake died inside sbatch, so Slurm may or may not have the batch, or receive it later.
                task.abandoned.touch()
                task.read()
                if task.job:
                    return "wait"
            task.left_slurm = True
            return "repeat"
        if task in self._cancelled or (task.abandoned.exists() and job.state == "COMPLETING"):
            return "wait"
        stale = task.running == number and not _saw(inputs, task.started[number])
        if same and not stale and not task.abandoned.exists():
            return "adopt"
        self._cancelled.add(task)
        return "cancel"


def _saw(inputs: Iterable[str | Path], started: float) -> bool:
    """Whether no input has changed since a shard started."""
    return all(os.stat(path).st_mtime <= started for path in inputs if os.path.exists(path))
