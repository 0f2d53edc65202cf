"""Snakemake's scheduler `in-order`: starts ready jobs in the order of their priorities.

Snakemake's own schedulers weigh ready jobs against each other, which takes minutes for 10,000
jobs. A cluster has a queue of its own, so there is nothing to weigh.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from snakemake_interface_scheduler_plugins.base import SchedulerBase


class Scheduler(SchedulerBase):  # type: ignore[misc]
    """Takes ready jobs as long as their resources fit."""

    def select_jobs(
        self,
        selectable_jobs: Sequence[Any],
        remaining_jobs: Sequence[Any],
        available_resources: Mapping[str, int | str],
        input_sizes: dict[Any, int],
    ) -> Sequence[Any]:
        """The jobs to start now; time grows linearly with the number of ready jobs."""
        free = {name: value for name, value in available_resources.items() if isinstance(value, int)}
        chosen = []
        for job in sorted(selectable_jobs, key=lambda job: (-job.priority, job.jobid)):
            asked = {name: job.scheduler_resources.get(name, 0) for name in free}
            if all(asked[name] <= free[name] for name in free):
                chosen.append(job)
                free = {name: free[name] - asked[name] for name in free}
        return chosen
