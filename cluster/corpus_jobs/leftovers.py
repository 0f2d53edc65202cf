"""What a Snakemake that died has left in Slurm, and what becomes of each of its shards: adopted, cancelled or repeated.

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
from common import run_records
from common.settings import Settings

Verdict = Literal["adopt", "cancel", "wait", "repeat"]


class Leftovers:
    """The shards of earlier batches that jobs of this run are about."""

    def __init__(self, settings: Settings, jobs: Iterable[Any]) -> None:
        self._settings = settings
        found = list(batches.left_over(settings.run))
        keys = {batches.key_of(job.rule.name, job.output) for job in jobs} if found else set[str]()
        self._tasks = {
            shard.key: (task, number)
            for task in found
            for number, shard in enumerate(task.shards)
            if shard.key in keys  # of several batches with the same shard, the newest counts
        }
        self._folders: dict[Path, list[Task]] = {}
        for task in found:
            self._folders.setdefault(task.folder, []).append(task)
        self.claimed: list[tuple[ShardJob, Task, int]] = []
        """Jobs that are ready, and about which nothing has been decided."""
        self._context = batches.context(os.environ)
        self._cancelled: set[Task] = set()
        self._gone: set[Task] = set()

    def claims(self, item: ShardJob) -> bool:
        """Whether an earlier batch has this job: then it is in `claimed` from now on."""
        if item.shard.key not in self._tasks or item.again:
            return False
        self.claimed.append((item, *self._tasks[item.shard.key]))
        return True

    def tasks(self) -> set[Task]:
        """The tasks about which Slurm has to be asked."""
        return {task for _, task, _ in self.claimed}

    def judge(self, item: ShardJob, task: Task, number: int, job: QueuedJob | None) -> Verdict:
        """What to do about a claimed job; `job` is its task in Slurm's queue."""
        task.read()
        same = item.shard == task.shards[number] and self._context == task.context
        inputs = [*item.job.input, *run_records.read_by(item.job.rule.name, self._settings)]
        result = task.ended.get(number)
        if result is not None:
            valid = same and result["exit"] == 0 and all(os.path.exists(path) for path in item.job.output)
            return "adopt" if valid and _is_newer(task.started[number], inputs) else "repeat"
        if job is None or not job.active:
            if not task.job:
                # Snakemake died inside sbatch, so Slurm may or may not have the batch, or receive it later.
                task.abandon()
                task.read()
                if task.job:
                    return "wait"
            self._gone.add(task)
            return "repeat"
        if task in self._cancelled or (task.abandoned and job.state == "COMPLETING"):
            return "wait"
        stale = task.running == number and not _is_newer(task.started[number], inputs)
        if same and not stale and not task.abandoned:
            return "adopt"
        self._cancelled.add(task)
        return "cancel"

    def release(self, item: ShardJob, task: Task, number: int) -> None:
        """Forget a job that has been decided about."""
        self.claimed.remove((item, task, number))
        del self._tasks[item.shard.key]

    def forget(self, task: Task) -> None:
        """Slurm has nothing more of this task."""
        self._gone.add(task)

    def done_with(self, folder: Path) -> bool:
        """Whether nobody needs a batch any more: no job of this run, and no task in Slurm."""
        if any(task.folder == folder for task, _ in self._tasks.values()):
            return False
        tasks = self._folders.get(folder, [])
        return all(task in self._gone or len(task.ended) == len(task.shards) for task in tasks)


def _is_newer(started: float, inputs: Iterable[str | Path]) -> bool:
    """Whether a shard that started then has seen its inputs as they are now."""
    return all(os.stat(path).st_mtime <= started for path in inputs if os.path.exists(path))
