"""Submits the jobs of the executor to Slurm, in batches as large as Slurm accepts."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.corpus_jobs import batches, dag_jobs
from cluster.corpus_jobs.batches import Request, Task
from cluster.corpus_jobs.dag_jobs import ShardJob, time_limit
from cluster.slurm import RefusedError
from common.errors import InputError
from common.settings import Settings

RETRY = 30.0  # seconds until sbatch is called again after a refusal that passes
SOON = 3.0  # the same, if a task has ended since: Slurm's own count falls a moment later


class Submitter:
    """Calls sbatch, and again later if Slurm refuses a batch for a reason that passes."""

    def __init__(
        self,
        settings: Settings,
        prepare: Callable[[Any], None],
        submitted: Callable[[ShardJob, Task, int], None],
        report: Callable[[str, str], None],
    ) -> None:
        """`prepare` makes the folders of a job's outputs; `submitted` gets each job with its task.

        `report`: called with sbatch and its problem, empty if it has passed.
        """
        self._settings, self._prepare_job = settings, prepare
        self._submitted, self._report = submitted, report
        self._retry_at = 0.0
        self._room = sys.maxsize  # tasks to try to submit at once; few after a refusal
        self.avoided: dict[str, None] = {}
        """Nodes to exclude, in the order in which they failed."""

    @property
    def may_submit(self) -> bool:
        """Whether no refusal has to pass first."""
        return time.monotonic() >= self._retry_at

    def task_ended(self) -> None:
        """Slurm has room for one more task."""
        self._room += 1
        self._retry_at = min(self._retry_at, time.monotonic() + SOON)

    def submit(self, ready: Sequence[ShardJob]) -> None:
        """Submit jobs, those with equal requests together."""
        groups: dict[Request, list[ShardJob]] = {}
        for item in sorted(ready, key=lambda item: (item.shard.rule, item.shard.label)):
            groups.setdefault(item.request, []).append(item)
        corpus = self._settings.cluster.corpus
        for request, members in groups.items():
            for whole in batches.split(len(members), corpus.shards_per_job, corpus.max_tasks):
                parts = whole[: max(1, self._room)]
                for item in (members[number] for part in parts for number in part):
                    self._prepare(item)
                if not self._submit_batch(request, members, parts) or len(parts) < len(whole):
                    return  # the rest follows
        self._report("sbatch", "")

    def _prepare(self, item: ShardJob) -> None:
        """Make the folders of a job's outputs, and rename or remove its old logs."""
        for log in map(Path, item.shard.logs):
            if item.job.attempt > 1 and log.exists():
                log.replace(log.with_suffix(f".attempt{item.job.attempt - 1}{log.suffix}"))
            elif not item.again:
                log.unlink(missing_ok=True)
        self._prepare_job(item.job)

    def _submit_batch(self, request: Request, members: Sequence[ShardJob], parts: Sequence[range]) -> bool:
        """Submit a batch; returns whether Slurm accepts it.

        After a refusal because of a limit on queued jobs, the next batch is half as large.
        """
        run, site = self._settings.run, dag_jobs.site_of(self._settings, request)
        rules = [members[number].shard.rule for part in parts for number in part]
        tasks = batches.write_batch(run, [item.shard for item in members], parts, request, site, self.avoided)
        try:
            job = slurm.submit(tasks[0].folder / "batch.sh", time_limit=time_limit(rules[0]), site=site)
        except InputError as error:
            batches.remove(tasks[0].folder)  # if Slurm has accepted it after all, its tasks end at once
            name = batches.title(rules)
            if not isinstance(error, RefusedError) or not error.passes:
                if not self.avoided:
                    raise InputError(f"{name}: {error}") from None
                self.avoided.clear()  # perhaps no node was left: try them again, while their shards may lose a task
                return False
            if error.too_many:
                self._room = len(parts) // 2
            if not error.too_many or not self._room:
                then = "the rest follows as jobs end" if error.too_many else f"trying again every {RETRY:.0f} s"
                self._report("sbatch", f"{name}: {error.what}; {then}")
                self._retry_at = time.monotonic() + RETRY
            return False
        batches.accepted(tasks, job)
        self._room = max(self._room, 2 * len(parts))
        for task, part in zip(tasks, parts, strict=True):
            for number, member in enumerate(part):
                self._submitted(members[member], task, number)
        return True
