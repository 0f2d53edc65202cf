"""What the executor takes from a job of Snakemake's DAG: its command, its name, and what it asks of Slurm."""

from dataclasses import dataclass
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Request, Shard
from common.settings import ClusterSettings, Settings, SiteSettings

_MOST = 3  # times the first attempt's memory and time: a job that needs more has another fault
_DAY = 24 * 60  # minutes


@dataclass(eq=False)
class ShardJob:
    """A job of the DAG on its way through the executor."""

    job: Any
    shard: Shard
    request: Request
    again: bool = False
    """Whether it was submitted before: it does not wait for others of its rule, and its last log is kept."""
    losses: int = 0
    """How many of its tasks were lost with their node, or preempted for good."""
    time_limits: int = 0
    """How many times it reached its time limit."""
    idle_tasks: int = 0
    """How many tasks in a row ended before they started it or any other shard."""


def unlimit_threads(workflow: Any) -> None:
    """Give submitted jobs the threads that their rules ask for, whatever the cores of this machine.

    Snakemake caps the threads of every rule at --cores, and the profile in profiles/default sets that to all cores of
    the login node. Local rules keep their own limit in the local executor.
    """
    workflow.global_resources["_cores"] = None


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
        cluster.corpus.partitions.get(batches.rule_key(job.rule.name), ""),
    )


def resumes(job: Any) -> bool:
    """Whether a job that was ended goes on where it stopped, so that it may take many times its time limit."""
    return bool(job.resources.get("resumes", 0))


def site_of(settings: Settings, request: Request) -> SiteSettings:
    """What the site asks of a batch."""
    return settings.cluster_of(request.model).site_of(request.gpus, request.partition)


def describe(job: Any, cluster: ClusterSettings) -> ShardJob:
    """What the tasks need to know about a job. Raises WorkflowError for a kind of job that they cannot run."""
    from snakemake.shell import shell

    odd = {
        "groups": job.is_group,
        "rules without a shell command": lambda: not job.is_shell,
        "conda, containers and environment modules": lambda: job.conda_env or job.container_img or job.env_modules,
        "shadow folders": lambda: job.is_shadow,
        "pipes and services": lambda: job.is_pipe or job.is_service,
        "benchmarks": lambda: job.benchmark is not None,
    }
    for what, found in odd.items():
        if found():
            raise WorkflowError(f"rule {job}: the executor slurm-batch cannot run {what}")
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
    return ShardJob(job, shard, request_of(job, cluster), again=job.attempt > 1)
