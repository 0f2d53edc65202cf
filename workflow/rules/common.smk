# The validated configuration, and the paths that more than one file of rules needs.
#
# A step reads the settings file in $URLS_TO_GPT2_SETTINGS, which never changes. `params` holds what the output depends
# on, as plain data; Snakemake compares it. A param that must not make work run again is a Path or a function of `output`:
# Snakemake records neither. Every path is quoted (:q).

from common import rule_keys, snakefile

settings = snakefile.read_settings(workflow)
RUN = settings.run
SHARDS = [f"{shard:04d}" for shard in range(settings.shards)]


wildcard_constraints:
    shard=r"\d+",
    model=r"\w+",
