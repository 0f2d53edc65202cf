"""Jobs that may start on fewer nodes than they ask for (`cluster.min_nodes`), and grow again.

    python -m cluster.submit --config my.yaml --model gpt2_345m --grow

A waiting process lets its job accept fewer nodes after `cluster.shrink_after_minutes` in the queue
(`Patience`). A running job takes more nodes only if a person asks for it (`grow`): it saves, is
requeued, and starts on the nodes that are free then.
"""

import time
from pathlib import Path

from cluster import slurm
from cluster.executors import node_counts, node_range
from cluster.jobs import Job, read_job
from cluster.slurm import QueuedJob
from common.config import load_settings
from common.console import note
from common.errors import InputError


def counts_of(job: Job, name: str) -> tuple[list[int], int]:
    """The numbers of nodes on which a job may start, largest first, and how long it waits for all.

    From its snapshot; an unrecorded job has one number, 0.
    """
    if not job.snapshot:
        return [0], 0
    settings = load_settings(Path(job.snapshot) / "settings.yaml")
    counts, _ = node_counts(name, settings.models[name], settings.cluster)
    return counts, settings.cluster.shrink_after_minutes


class Patience:
    """Has a job wait in the queue for all its nodes, then for fewer."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._counts, self._minutes = counts_of(job, name)
        self._since: float | None = None  # when it was first seen in the queue, since its last start
        self._asked = ""

    def look(self, queued: QueuedJob | None) -> None:
        """Change what the job asks for if it is time; call it at every poll."""
        if queued is None or queued.state != "PENDING":
            self._since, self._asked = None, ""
        elif len(self._counts) > 1 and self._minutes:
            self._since = self._since or time.monotonic()
            wait = 0 if time.monotonic() - self._since >= 60 * self._minutes else self._minutes
            nodes = node_range(self._counts, wait)
            if nodes != self._asked and slurm.set_nodes(self._job.id, nodes):
                self._asked = nodes
                if not wait:
                    note(f"{self._name}: job {self._job.id} accepts {nodes} nodes from now on")


def grow(folder: Path, name: str) -> str:
    """Have the job of a model folder save and come back if that gives it more nodes; says what it does.

    Raises InputError if the job does not run, or may run on one number of nodes only.
    """
    job = read_job(folder)
    details = None if job is None or job.executor != "slurm" else slurm.details(job.id)
    if job is None or details is None or details["JobState"] != "RUNNING":
        raise InputError(f"{name}: no job on Slurm that runs; only a running job can grow")
    counts, _ = counts_of(job, name)
    if len(counts) == 1:
        raise InputError(f"{name}: job {job.id} has a fixed number of nodes; set cluster.min_nodes and submit it again")
    nodes = int(details["NumNodes"].partition("-")[0])
    idle = slurm.idle_nodes(details["Partition"])
    possible = next((count for count in counts if count <= nodes + idle), 0)
    has = f"{name}: job {job.id} has {nodes} of {counts[0]} nodes"
    if possible <= nodes:
        return f"{has}, and {idle} more are idle; it stays" if nodes < counts[0] else f"{has}; it stays"
    slurm.interrupt(job.id)
    return f"{has}, and {idle} more are idle; it saves and starts again on {possible}"
