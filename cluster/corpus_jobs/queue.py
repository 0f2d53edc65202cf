"""Slurm's queue as the executor sees it: which tasks wait or run, and which have left it.

squeue is called once per interval for all tasks, in a thread: on a busy cluster it takes minutes,
and results are read meanwhile.
"""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from cluster import slurm
from cluster.corpus_jobs.batches import Task
from cluster.slurm import QueuedJob

_PATIENCE = 300.0  # seconds until squeue is given up


class Queue:
    """Calls squeue, and judges by its answers."""

    def __init__(self, interval: float, latency: float) -> None:
        """`interval`: seconds between calls; `latency`: until another node's file is visible."""
        self._interval, self._latency = interval, latency
        self._next = 0.0
        self._tasks: set[Task] = set()
        self._answer: Future[list[QueuedJob] | None] | None = None

    def poll(self, tasks: set[Task]) -> tuple[set[Task], list[QueuedJob] | None] | None:
        """Ask about `tasks` if it is time; returns an answer with its tasks if one has come."""
        if self._answer is not None and self._answer.done():
            answered, self._answer = self._answer, None
            return self._tasks, answered.result()
        if self._answer is None and tasks and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            self._tasks, self._answer = tasks, _ask({task.array for task in tasks if task.job})
        return None

    def has_left(self, task: Task, job: QueuedJob | None) -> bool:
        """Whether a task has ended and its last results are visible; `job`: its queue entry."""
        now = time.monotonic()
        if job is not None and job.active:
            task.missing = None
            return False
        task.missing = task.missing or now
        self._next = min(self._next, task.missing + self._latency)
        return now >= task.missing + self._latency


def _ask(arrays: set[str]) -> "Future[list[QueuedJob] | None]":
    future: Future[list[QueuedJob] | None] = Future()

    def run() -> None:
        try:
            future.set_result(slurm.queue(arrays, timeout=_PATIENCE))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # no executor of threads: their ends are waited for
    return future


def hidden(tasks: Iterable[Task], known: Iterable[str]) -> list[Task]:
    """The tasks that may still be running although squeue does not show them.

    With PrivateData=jobs it does not show the jobs of other users. `known`: the ids that it shows.
    """
    foreign = [task for task in tasks if task.job not in known and task.foreign]
    if not foreign or not slurm.hides_jobs():
        return []
    for task in foreign:
        if not task.working:
            task.abandon()  # it may wait in the queue, and starts nothing from now on
            task.read()
    return [task for task in foreign if task.working]
