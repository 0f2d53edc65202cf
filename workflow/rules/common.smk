# The validated settings, and the names that several rule files use.
#
# Every step reads the settings file named by $URLS_TO_GPT2_SETTINGS, which never changes. `params` holds the settings
# that an output depends on, as plain data, which Snakemake compares to decide what to run again. A param that must not
# cause a rerun is a Path or a function of `output`, because Snakemake records neither. Every path is quoted (:q).

import shlex
from functools import cache
from pathlib import Path

from workflow import growing, snakefile
from common import steps
from corpus.index import content_of
from common.files import REMOVED_IDS, find_inputs, sha256, shard_name
from training.model_folder import is_finished

settings = snakefile.read_settings(workflow)
RUN = settings.run
SHARDS = [shard_name(shard) for shard in range(settings.shards)]


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


def earlier(step):
    """The options that leave out what the runs that this one grows have read; they may leave nothing."""
    paths = growing.known(step, settings)
    return f"--allow-empty --known {shlex.join(map(str, paths))}" if paths else ""


def removed(wildcards, output):
    """The option that keeps out what was removed from this run and from those that it grows."""
    return f"--removed {shlex.join(str(run / REMOVED_IDS) for run in (*settings.base, RUN))}"


def runtime(rule, minutes):
    """`runtime` of a rule, in minutes: the rule's key in `cluster.corpus.runtime_minutes`, or this default."""
    return settings.cluster.corpus.runtime_minutes.get(rule, minutes)


def made_here(paths):
    """Those of some paths that rules of this run make."""
    return [path for path in map(str, paths) if Path(path).is_relative_to(RUN)]


def hashes(paths):
    """The hash of each file from outside of the run, for `params`."""
    others = [path for path in map(str, paths) if not made_here([path])]
    return {
        str(file): sha256(file)
        for path in others
        for file in find_inputs(path, "lists")[0]
    }


@cache
def contents(model):
    """A checksum of each dataset of a model that another run or tool has made, for `params`."""
    prefixes = [source.prefix for source in settings.datasets(model)]
    return {
        str(prefix): content_of(prefix)
        for prefix in prefixes
        if not made_here([prefix])
    }


@cache
def may_fetch():
    """True; ends Snakemake in one line if pages are missing and `scrape.contact` is empty, before any job runs."""
    if not all(map(Path.exists, map(Path, expand(result("scrape"), shard=SHARDS)))):
        snakefile.check_before_jobs(
            workflow, lambda: snakefile.require_contact(settings)
        )
    return True


@cache
def has_tasks(model):
    """True; ends Snakemake in one line if the evaluation of the model needs a package or tasks that are not there."""
    if not Path(result("evaluate").format(model=model)).exists():
        snakefile.check_before_jobs(
            workflow, lambda: snakefile.check_evaluation(settings)
        )
    return True


@cache
def fits(model):
    """True; ends Snakemake in one line if the model needs memory, files or packages that it will not have.

    Also if it is finished with other settings. Asked when the DAG is built: a laptop builds no corpus for a model that
    it cannot train.
    """
    snakefile.check_before_jobs(
        workflow,
        lambda: is_finished(settings, model) or snakefile.check_model(settings, model),
    )
    return True
