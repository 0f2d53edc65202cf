"""What `snakemake -n` prints for the executor slurm-batch: the batches that a run would submit."""

import os
from typing import Any

from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Request
from cluster.corpus_jobs.dag_jobs import request_of, site_of, unlimit_threads
from common import snakefile
from common.settings import Settings
from common.tables import text_table

HEADER = ("rule", "shards", "tasks", "shards per task", "cpus", "memory MB", "minutes", "partition")


def print_plan() -> None:
    """Print the table if the Snakemake of this process made a dry run."""
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
    rows = plan(jobs, settings)
    if rows:
        print(f"\nThis run would call sbatch {len(rows)} times, apart from training:\n")
        print(text_table([HEADER, *rows], "lrrrrrrl"))


def plan(jobs: list[Any], settings: Settings) -> list[tuple[object, ...]]:
    """One row per sbatch call, in the order of the DAG. Jobs that are ready together and ask for the same share one."""
    levels: dict[Any, int] = {}

    def level(job: Any) -> int:
        if job not in levels:
            earlier = [level(other) + 1 for other in job.dag.dependencies[job]]
            levels[job] = max(earlier, default=0)
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
