"""Decides when jobs that are ready are submitted: a rule's jobs together, so that they share one job array.

A job is held until all jobs of its rule are ready. Jobs that were submitted before do not wait, and nobody waits if
nothing is running that could make more jobs ready.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from cluster.corpus_jobs.dag_jobs import ShardJob

IDLE = 3.0  # seconds without any news after which jobs are no longer held back


class HeldJobs:
    """Jobs that are ready and not submitted yet, in order."""

    def __init__(self, needed: Iterable[Any]) -> None:
        """`needed`: the jobs of the DAG that will come."""
        self._awaited = Counter(job.rule.name for job in needed)
        self._held: dict[ShardJob, None] = {}
        self._news = time.monotonic()

    def add(self, item: ShardJob) -> None:
        """Hold a job that Snakemake has called ready."""
        self.news()
        self._awaited[item.shard.rule] -= item.job.attempt == 1
        self._held[item] = None

    def return_all(self, items: Iterable[ShardJob]) -> None:
        """Hold jobs again whose task ended before it started them."""
        self._held |= dict.fromkeys(items)

    def adopt(self, item: ShardJob) -> None:
        """Nobody has to wait for this job: a task of an earlier run has it."""
        self.news()
        self._awaited[item.shard.rule] -= 1

    def remove(self, item: ShardJob) -> None:
        """A job was submitted, or cannot be."""
        del self._held[item]

    def news(self) -> None:
        """Something has ended or become ready, so that more may follow."""
        self._news = time.monotonic()

    def ready(self, busy: bool, running: Callable[[], int]) -> list[ShardJob]:
        """The jobs to submit now.

        `busy`: tasks of ours are queued or running. `running` counts the jobs that Snakemake considers started.
        """
        whole = [item for item in self._held if item.again or self._awaited[item.shard.rule] <= 0]
        if not self._held or whole or busy or time.monotonic() < self._news + IDLE:
            return whole
        return list(self._held) if running() == len(self._held) else []
