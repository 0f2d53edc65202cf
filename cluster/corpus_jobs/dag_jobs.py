"""What the executor takes from the jobs of Snakemake's DAG: what each runs and asks of Slurm, and which go together.

A job waits until all jobs of its rule are ready, so that they share one job array (`PendingJobs`). `snakemake -n`
prints the batches that a run would submit (`print_plan`).
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Request, Shard
from common.console import text_table
from common.errors import ConfigError
from common.settings import ClusterSettings, Settings, SiteSettings
from workflow import snakefile
from workflow.steps import rule_key

IDLE = 3.0  # seconds without news after which jobs wait for no others
_MOST = 3  # times the first attempt's memory and time: a job that needs more has another fault
_DAY = 24 * 60  # minutes
_HEADER = ("rule", "shards", "tasks", "shards per task", "cpus", "memory MB", "minutes", "partition")


@dataclass(eq=False)
class ShardJob:
    """A job of the DAG on its way through the executor."""

    job: Any
    shard: Shard
    request: Request
    again: bool = False
    """Whether it was submitted before: it does not wait for others of its rule, and its last log is kept."""
    lost: int = 0
    """How many tasks ended before they could finish it, for reasons of their own."""


def unlimit_threads(workflow: Any) -> None:
    """Give submitted jobs the threads that their rules ask for, whatever the cores of this machine.

    Snakemake caps the threads of every rule at --cores, and the profile in profiles/default sets that to all cores of
    the login node. Local rules keep their own limit in the local executor.
    """
    workflow.global_resources["_cores"] = None


def time_limit(rule: str) -> str:
    """The key of a rule's time limit."""
    return f"cluster.corpus.runtime_minutes.{rule_key(rule)}"


def request_of(job: Any, cluster: ClusterSettings) -> Request:
    """What a job asks of Slurm: what its rule says, and two and three times as much memory and time when it is retried.

    A time limit does not grow beyond a day, because partitions have limits, nor that of a rule that resumes. Rules say
    constants, because functions of the attempt make planning slow.
    """
    mem_mb, minutes = (job.resources.get(name) for name in ("mem_mb", "runtime"))
    times = min(job.attempt, _MOST)
    if isinstance(minutes, int) and not resumes(job):
        minutes = max(minutes, min(minutes * times, _DAY))
    gpus = job.resources.get("gpu", 0)
    return Request(
        job.threads,
        mem_mb * times if isinstance(mem_mb, int) else None,
        minutes if isinstance(minutes, int) else None,
        gpus,
        job.wildcards_dict.get("model", "") if gpus else "",
        cluster.corpus.partitions.get(rule_key(job.rule.name), ""),
    )


def check_time_limits(needed: Iterable[Any], settings: Settings, limits: Mapping[str, int]) -> None:
    """Raise ConfigError if Slurm would refuse a rule's time limit, perhaps after days of other rules.

    `limits`: see `slurm.time_limits`.
    """
    over = {}
    for rule, job in {job.rule.name: job for job in needed}.items():
        asked = request_of(job, settings.cluster)
        if asked != (most := _within_limit(asked, settings, limits)):
            over[time_limit(rule)] = f"({asked.minutes}, at most {most.minutes})"
    if over:
        shown = ", ".join(f"{key} {limits}" for key, limits in over.items())
        raise ConfigError(f"over MaxTime of the partition: {shown}; lower them, or change cluster.corpus.partition")


def _within_limit(request: Request, settings: Settings, limits: Mapping[str, int]) -> Request:
    """The request, with at most its partition's MaxTime."""
    site = site_of(settings, request)
    if site.qos or re.search("--(qos|partition|time)=", " ".join(site.sbatch)):  # a QOS may allow more
        return request
    names = (os.environ.get("SBATCH_PARTITION") or site.partition).split(",")
    longest = max(limits.get(name, math.inf) for name in names)
    return request if (request.minutes or 0) <= longest else replace(request, minutes=int(longest))


def resumes(job: Any) -> bool:
    """Whether a job that was ended goes on where it stopped, so that it may take many times its time limit."""
    return bool(job.resources.get("resumes", 0))


def site_of(settings: Settings, request: Request) -> SiteSettings:
    """What the site asks of a batch."""
    return settings.cluster_of(request.model).site_of(request.gpus, request.partition)


def describe(job: Any, settings: Settings, limits: Mapping[str, int]) -> ShardJob:
    """What the tasks need to know about a job. Raises WorkflowError for a kind of job that they cannot run."""
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
    )
    request = _within_limit(request_of(job, settings.cluster), settings, limits)
    return ShardJob(job, shard, request, again=job.attempt > 1)


class PendingJobs:
    """Jobs that are ready and not submitted yet, in order."""

    def __init__(self, needed: Iterable[Any]) -> None:
        """`needed`: the jobs of the DAG that will come."""
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
        """The jobs to submit now: those of rules that are complete, and all if nothing can make more jobs ready.

        `busy`: tasks of ours are queued or running. `running` gives the jobs that Snakemake considers started.
        """
        whole = [item for item in self.jobs if item.again or self._awaited[item.shard.rule] <= 0]
        if not self.jobs or whole or busy or time.monotonic() < self._touched + IDLE:
            return whole
        return list(self.jobs) if sum(not job.is_local for job in list(running())) == len(self.jobs) else []


def print_plan() -> None:
    """Print the batches that would be submitted, if the Snakemake of this process made a dry run."""
    workflow, settings = snakefile.parsed or (None, None)
    if workflow is None or settings is None or not workflow.dryrun or not len(workflow.dag):
        return
    unlimit_threads(workflow)
    # in a dry run, `is_local` is true of every job
    jobs = [
        job
        for job in workflow.dag.needrun_jobs(exclude_finished=False)
        if not job.rule.norun and job.rule.name not in workflow._localrules
    ]
    if rows := _plan(jobs, settings):
        print(f"\nThis run would call sbatch {len(rows)} times, apart from training:\n")
        print(text_table([_HEADER, *rows], "lrrrrrrl"))


def _plan(jobs: list[Any], settings: Settings) -> list[tuple[object, ...]]:
    """One row per sbatch call, in the order of the DAG. Jobs that are ready together and ask for the same share one."""
    levels: dict[Any, int] = {}

    def level(job: Any) -> int:
        if job not in levels:
            levels[job] = max((level(other) + 1 for other in job.dag.dependencies[job]), default=0)
        return levels[job]

    of_rule: dict[str, int] = {}
    for job in jobs:
        of_rule[job.rule.name] = max(of_rule.get(job.rule.name, 0), level(job))
    groups: dict[tuple[int, Request], list[str]] = {}
    for job in jobs:
        job.attempt = 1  # has the resources computed again
        groups.setdefault((of_rule[job.rule.name], request_of(job, settings.cluster)), []).append(job.rule.name)
    rows: list[tuple[object, ...]] = []
    corpus = settings.cluster.corpus
    for (_, request), rules in sorted(groups.items(), key=lambda item: item[0][0]):
        for tasks in batches.split(len(rules), corpus.shards_per_job, corpus.max_tasks):
            shards = [len(task) for task in tasks]
            partition = site_of(settings, request).partition or os.environ.get("SBATCH_PARTITION", "the default")
            asked = (request.mem_mb or "the default", request.minutes or "the default")
            rows.append((batches.title(rules), sum(shards), len(tasks), max(shards), request.cpus, *asked, partition))
    return rows
