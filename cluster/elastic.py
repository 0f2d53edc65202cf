"""Jobs that may start on fewer nodes than they ask for (`cluster.min_nodes`), and grow again.

    python -m cluster.submit --config my.yaml --model gpt2_345m --grow

A waiting process lets its job accept fewer nodes after `cluster.shrink_after_minutes` in the queue
(`Patience`). A running job takes more nodes only if a person asks for it (`grow`): it saves, is
requeued, and starts on the nodes that are free then.
"""

import time
from pathlib import Path
from typing import NamedTuple, Self

from cluster import slurm
from cluster.executors import node_counts
from cluster.jobs import Job, read_job
from cluster.slurm import QueuedJob
from common.config import load_settings
from common.console import note
from common.errors import InputError


class Sizes(NamedTuple):
    """On how many nodes a job may start, from its snapshot."""

    nodes: list[int]
    """Largest first; [0] for a job without a snapshot."""
    tasks: int
    """Processes per node."""
    shrink_after: int
    """Minutes for which it waits for all its nodes."""

    @classmethod
    def of(cls, job: Job, name: str) -> Self:
        """Those of the job of model `name`."""
        path = Path(job.snapshot) / "settings.yaml"
        if not job.snapshot or not path.is_file():
            return cls([0], 1, 0)
        settings = load_settings(path)
        return cls(*node_counts(name, settings.models[name], settings.cluster), settings.cluster.shrink_after_minutes)

    def describe(self, processes: int) -> str:
        """`3 of 4 nodes, 25 % slower than planned` for a start with fewer; else empty."""
        nodes = processes // self.tasks
        if nodes >= self.nodes[0]:
            return ""
        return f"{nodes} of {self.nodes[0]} nodes, {100 - 100 * nodes // self.nodes[0]} % slower than planned"


class Patience:
    """Has a job wait in the queue for all its nodes, then for fewer.

    Slurm 22.05 starts a job whose range was changed on its smallest number. So the job is given one
    number at a time: the largest that the idle nodes allow, and each minute a smaller one, because
    idle nodes may lack something that the job asks for.
    """

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._sizes = Sizes.of(job, name)
        self._since: float | None = None  # when it was first seen in the queue, since its last start
        self._asked = 0

    def look(self, queued: QueuedJob | None) -> None:
        """Change how many nodes the job asks for if it is time; call it at every poll."""
        if queued is None or queued.state != "PENDING":
            self._since, self._asked = None, 0
        elif len(self._sizes.nodes) > 1 and self._sizes.shrink_after:
            self._since = self._since or time.monotonic()
            nodes = self._wanted((time.monotonic() - self._since) / 60 - self._sizes.shrink_after)
            if nodes != self._asked and slurm.set_nodes(self._job.id, nodes):
                self._asked = nodes
                if nodes < self._sizes.nodes[0]:
                    note(f"{self._name}: job {self._job.id} accepts {nodes} of {self._sizes.nodes[0]} nodes now")

    def _wanted(self, minutes: float) -> int:
        """The nodes to ask for, `minutes` after the job should accept fewer."""
        if minutes < 0:
            return self._sizes.nodes[0]
        details = slurm.details(self._job.id) or {}
        idle = slurm.idle_nodes(details.get("Partition", ""))
        possible = [count for count in self._sizes.nodes if count <= idle] or self._sizes.nodes[-1:]
        return possible[min(int(minutes), len(possible) - 1)]


def grow(folder: Path, name: str) -> str:
    """Restart the running job of a model folder if that gives it more nodes; returns what it does.

    Raises InputError if the job does not run, or may run on one number of nodes only.
    """
    job = read_job(folder)
    details = None if job is None or job.executor != "slurm" else slurm.details(job.id)
    if job is None or details is None or details["JobState"] != "RUNNING":
        raise InputError(f"{name}: no job on Slurm that runs; only a running job can grow")
    counts = Sizes.of(job, name).nodes
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
