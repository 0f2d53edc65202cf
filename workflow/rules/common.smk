# The validated settings, and the names that several rule files use.
#
# Every step reads the settings file named by $URLS_TO_GPT2_SETTINGS, which never changes. `params` holds the settings
# that an output depends on, as plain data, which Snakemake compares to decide what to run again. A param that must not
# cause a rerun is a Path or a function of `output`, because Snakemake records neither. Every path is quoted (:q).

from functools import cache

from common import rule_keys, snakefile
from common.files import shard_name
from training.planning.auto import prepare

settings = snakefile.read_settings(workflow)
RUN = settings.run
SHARDS = [shard_name(shard) for shard in range(settings.shards)]


wildcard_constraints:
    shard=r"\d+",
    model=r"\w+",


def runtime(rule, minutes):
    """`runtime` of a rule, in minutes: the rule's key in `cluster.corpus.runtime_minutes`, or this default."""
    return settings.cluster.corpus.runtime_minutes.get(rule, minutes)


@cache
def may_fetch():
    """True; ends Snakemake in one line if pages are missing and `scrape.contact` is empty, before any job runs."""
    if not all((RUN / f"pages/{shard}.jsonl.zst").exists() for shard in SHARDS):
        snakefile.check_before_jobs(
            workflow, lambda: snakefile.require_contact(settings)
        )
    return True


@cache
def fits(model):
    """True; ends Snakemake in one line if the model needs more memory or time than it will have.

    Asked when the DAG is built: a laptop builds no corpus for a model that it cannot train.
    """
    if not (settings.model_folder(model) / "done.json").exists():
        snakefile.check_before_jobs(workflow, lambda: prepare(settings, model))
    return True
