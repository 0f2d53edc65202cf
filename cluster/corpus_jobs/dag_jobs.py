"""Converts jobs of Snakemake's DAG for the executor: command, Slurm request, grouping.

A job waits until all jobs of its rule are ready, so that they share one job array (`PendingJobs`).
One that an earlier run has left in Slurm is adopted or repeated (`OrphanedJobs`). `snakemake -n`
prints the batches that a run would submit (`print_plan`).
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from snakemake_interface_common.exceptions import WorkflowError

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Request, Shard, Task
from cluster.slurm import QueuedJob
from common.console import text_table
from common.settings import ClusterSettings, Settings, SiteSettings
from common.steps import read_by, rule_key

IDLE = 3.0  # seconds without news after which jobs wait for no others
_MOST = 3  # times the first attempt's memory: a job that needs more has another fault
Verdict = Literal["adopt", "cancel", "wait", "repeat"]
_HEADER = ("rule", "shards", "tasks", "shards per task", "cpus", "memory MB", "minutes", "partition")

parsed: tuple[Any, Settings] | None = None
"""The workflow of this process and its settings; set when the Snakefile is parsed."""


@dataclass(eq=False)
class ShardJob:
    """A job of the DAG on its way through the executor."""

    job: Any
    shard: Shard
    request: Request
    again: bool = False
    """Submitted before: it does not wait for others of its rule, and its last log is kept."""
    lost: int = 0
    """How many tasks ended while it ran, for reasons of their own."""
    nodes: list[str] = field(default_factory=list)
    """Where tasks ended before they started any shard."""


def give_up(job: Any) -> None:
    """Make the current attempt of a job its last; Snakemake compares the attempt with `retries`."""
    job.attempt = job.restart_times + 1


def unlimit_threads(workflow: Any) -> None:
    """Give submitted jobs the threads that their rules ask for, whatever the cores of this machine.

    Snakemake caps the threads of every rule at --cores, and the profile in profiles/default sets
    that to all cores of the login node. Local rules keep their own limit in the local executor.
    """
    workflow.global_resources["_cores"] = None


def time_limit(rule: str) -> str:
    """The key of a rule's time limit."""
    return f"cluster.corpus.runtime_minutes.{rule_key(rule)}"


def request_of(job: Any, cluster: ClusterSettings) -> Request:
    """What a job asks Slurm for; its second attempt gets twice the memory, later ones three times.

    Rules state constants, because functions of the attempt make planning slow.
    """
    mem_mb, minutes = (job.resources.get(name) for name in ("mem_mb", "runtime"))
    gpus = job.resources.get("gpu", 0)
    return Request(
        job.threads,
        mem_mb * min(job.attempt, _MOST) if isinstance(mem_mb, int) else None,
        minutes if isinstance(minutes, int) else None,
        gpus,
        job.wildcards_dict.get("model", "") if gpus else "",
        cluster.corpus.partitions.get(rule_key(job.rule.name), ""),
    )


def site_of(settings: Settings, request: Request) -> SiteSettings:
    """The site's settings for a batch."""
    return settings.cluster_of(request.model).site_of(request.gpus, request.partition)


def describe(job: Any, settings: Settings) -> ShardJob:
    """Convert a job for the tasks. Raises WorkflowError for a kind of job that they cannot run."""
    from snakemake.shell import shell

    if job.is_group() or not job.is_shell or job.conda_env or job.container_img or job.env_modules or job.is_shadow:
        raise WorkflowError(f"rule {job}: the executor slurm-batch runs plain shell commands only")
    executable = shell.get_executable()
    # exactly the text that a local run gives to the shell
    parts = (shell._get_process_prefix(executable), job.shellcmd, shell._process_suffix)
    shard = Shard(
        key=batches.key_of(job.rule.name, job.output),
        label=".".join(map(str, job.wildcards_dict.values())) or job.rule.name,
        rule=job.rule.name,
        command=" ".join(parts).strip(),
        shell=executable,
        threads=job.threads,
        logs=[str(path) for path in job.log],
        context=batches.context(os.environ),
    )
    return ShardJob(job, shard, request_of(job, settings.cluster), again=job.attempt > 1)


class PendingJobs:
    """Jobs that are ready and not submitted yet, in order."""

    def __init__(self, needed: Iterable[Any]) -> None:
        """`needed`: the jobs of the DAG that will run."""
        self.jobs: dict[ShardJob, None] = {}
        self._awaited = Counter(job.rule.name for job in needed)
        self._touched = time.monotonic()

    def arrived(self, job: Any) -> None:
        """Snakemake has called a job ready."""
        self.touch()
        self._awaited[job.rule.name] -= job.attempt == 1

    def touch(self) -> None:
        """Something has ended or become ready, so that more may follow."""
        self._touched = time.monotonic()

    def ready(self, busy: bool, running: Callable[[], Iterable[Any]]) -> list[ShardJob]:
        """The jobs to submit now: those of complete rules, or all if no more can become ready.

        `busy`: tasks of ours are queued or running. `running` gives the jobs that Snakemake
        considers started.
        """
        whole = [item for item in self.jobs if item.again or self._awaited[item.shard.rule] <= 0]
        if not self.jobs or whole or busy or time.monotonic() < self._touched + IDLE:
            return whole
        return list(self.jobs) if sum(not job.is_local for job in list(running())) == len(self.jobs) else []


class OrphanedJobs:
    """The shards that a dead Snakemake has left in Slurm and that this run needs.

    A shard is adopted if its command and settings are what would be submitted now, and no input is
    newer than its start. Its task then counts as one of this run: queued, running, or finished with
    success. Everything else is repeated, but only when Slurm says that no task works on the shard
    any more; a task that works on something else is cancelled.
    """

    def __init__(self, settings: Settings, needed: Iterable[Any]) -> None:
        """`needed`: the jobs of the DAG that will run."""
        self._settings = settings
        self._cancelled: set[Task] = set()
        self._shards: dict[str, tuple[Task, int]] = {}
        self.claimed: list[tuple[ShardJob, Task, int]] = []
        """Jobs that are ready and undecided."""
        if tasks := list(batches.recorded(settings.run)):
            keys = {batches.key_of(job.rule.name, job.output) for job in needed}
            every = ((shard.key, task, number) for task in tasks for number, shard in enumerate(task.shards))
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
        known = task.job
        task.read()
        same = item.shard == task.shards[number]
        inputs = [*item.job.input, *read_by(item.job.rule.name, self._settings)]
        result = task.ended.get(number)
        if result is not None:
            valid = same and result["exit"] == 0 and all(os.path.exists(path) for path in item.job.output)
            return "adopt" if valid and _saw(inputs, task.started[number]) else "repeat"
        if job is None or not job.active:
            # It starts nothing more if Slurm receives it later, because Snakemake died inside
            # sbatch, or has it under another id than sbatch printed.
            task.abandon()
            task.read()
            if task.job != known:
                return "wait"
            task.left_slurm = True
            return "repeat"
        if task in self._cancelled or (task.abandoned and job.state == "COMPLETING"):
            return "wait"
        stale = task.running == number and not _saw(inputs, task.started[number])
        if same and not stale and not task.abandoned:
            return "adopt"
        self._cancelled.add(task)
        return "cancel"


def _saw(inputs: Iterable[str | Path], started: float) -> bool:
    """Whether no input has changed since a shard started."""
    return all(os.stat(path).st_mtime <= started for path in inputs if os.path.exists(path))


def print_plan() -> None:
    """Print the batches that a run would submit, if this process made a dry run."""
    workflow, settings = parsed or (None, None)
    if workflow is None or settings is None or not workflow.dryrun or not len(workflow.dag):
        return
    unlimit_threads(workflow)
    if rows := _plan(workflow, settings):
        print(f"\nThis run would call sbatch {len(rows)} times, apart from training:\n")
        print(text_table([_HEADER, *rows], "lrrrrrrl"))


def _plan(workflow: Any, settings: Settings) -> list[tuple[object, ...]]:
    """One row per sbatch call, in the DAG's order.

    Jobs that are ready together and ask for the same resources share one call.
    """
    levels: dict[str, int] = {}  # of the last jobs of each rule
    jobs = []
    for level, generation in enumerate(workflow.dag.toposorted()):
        for job in generation:
            # in a dry run, `is_local` is true of every job
            if workflow.dag.needrun(job) and not job.rule.norun and job.rule.name not in workflow._localrules:
                levels[job.rule.name] = level
                jobs.append(job)
    groups: dict[tuple[int, Request], list[str]] = {}
    for job in jobs:
        job.attempt = 1  # has the resources computed again
        groups.setdefault((levels[job.rule.name], request_of(job, settings.cluster)), []).append(job.rule.name)
    rows: list[tuple[object, ...]] = []
    corpus = settings.cluster.corpus
    for (_, request), rules in sorted(groups.items(), key=lambda item: (item[0][0], min(item[1]))):
        for tasks in batches.split(len(rules), corpus.shards_per_job, corpus.max_tasks):
            shards = [len(task) for task in tasks]
            partition = site_of(settings, request).partition or os.environ.get("SBATCH_PARTITION", "the default")
            asked = (request.mem_mb or "the default", request.minutes or "the default")
            rows.append((batches.title(rules), sum(shards), len(tasks), max(shards), request.cpus, *asked, partition))
    return rows
