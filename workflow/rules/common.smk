# The validated settings, and the names that several rule files use.
#
# A rule has inputs, outputs and a command line. Snakemake records `input` and `params`, and repeats
# a job if they differ. It does not compare command lines (rerun-triggers in profiles/default).
# Therefore what an output depends on is a param, as plain data. A value that must not cause a rerun
# is a global name in the command line, such as {RUN} or {settings.evaluate.batch}. A new or removed
# param repeats the rule in all finished runs; a new or removed key of `settings=keys(…)` only if it
# is not at its default (`steps.changed`).
#
# Every step reads the settings file named by $URLS_TO_GPT2_SETTINGS, which never changes. Every path
# is quoted (:q).

import shlex
from functools import cache
from pathlib import Path

from workflow import checks, snakefile
from common import steps
from corpus.index import content_of
from common.files import REMOVED_IDS, find_inputs, sha256, shard_name

settings = snakefile.read_settings(workflow)
RUN = settings.run
SHARDS = [shard_name(shard) for shard in range(settings.shards)]
# Leaves out documents that were removed from this run or from its base.
REMOVED = "--removed " + shlex.join(
    str(run / REMOVED_IDS) for run in (*settings.base, RUN)
)


wildcard_constraints:
    shard=r"\d+",
    model=r"[\w-]+",


def result(step):
    """The pattern of a step's results."""
    return str(RUN / steps.named(step).pattern)


def keys(step, model=""):
    """The settings that a step's results depend on, for `params`."""
    return steps.keys(step, settings, model)


def stats(step):
    """The pattern of a step's statistics."""
    return str(RUN / steps.named(step).stats)


def rejects(step):
    """The pattern of the documents that a step drops."""
    return str(RUN / steps.named(step).rejects)


def known(step):
    """The options that leave out what the runs of `base` have read.

    blacklist gets their URL lists, ingest the statistics that name their inputs.
    """
    results = [steps.result(step, run) for run in settings.base]
    paths = [
        str(path.parent if step == "blacklist" else path)
        for path in results
        if path.is_file()
    ]
    return f"--allow-empty --known {shlex.join(paths)}" if paths else ""


def needs(rule, mem_mb, minutes):
    """The resources of a rule; `cluster.corpus.runtime_minutes` may replace its time."""
    runtime = settings.cluster.corpus.runtime_minutes.get(rule, minutes)
    return {"mem_mb": mem_mb, "runtime": runtime}


def made_here(paths):
    """The paths that rules of this run make."""
    return [path for path in map(str, paths) if Path(path).is_relative_to(RUN)]


def given(paths):
    """The paths outside the run."""
    return [path for path in map(str, paths) if not Path(path).is_relative_to(RUN)]


def hashes(paths):
    """The hash of each file outside the run, for `params`."""
    files = [file for path in given(paths) for file in find_inputs(path, "lists")[0]]
    return {str(file): sha256(file) for file in files}


@cache
def contents(model):
    """The checksum of each of a model's datasets outside the run, for `params`."""
    prefixes = given(source.prefix for source in settings.datasets(model))
    return {prefix: content_of(Path(prefix)) for prefix in prefixes}


@cache
def check(action, *arguments):
    """Call a check, once and before any job, that may end Snakemake with one line.

    Input functions call it, because only the DAG knows which jobs a run needs: a laptop builds no
    corpus for a model that it cannot train. Lists and drawings of the DAG check nothing.
    """
    if workflow.is_main_process and workflow.executor_plugin is not None:
        snakefile.or_exit(action)(settings, *arguments)
