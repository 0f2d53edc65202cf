# From a list of URLs to a trained GPT-2: `snakemake all`, or `snakemake --profile slurm all` on a cluster.
# Targets: all, corpus, dataset, train_<model>, merge_<model>, report, cards. The rules are in workflow/rules/.
# The configuration is config.yaml, or --configfile FILE instead of it; workflow/snakefile.py reads it.


include: "workflow/rules/common.smk"
include: "workflow/rules/dedup.smk"
include: "workflow/rules/corpus.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/report.smk"


# Runs after Snakemake has the lock and never with -n: parsing the DAG writes nothing.
onstart:
    snakefile.prepare_run(settings)


onsuccess:
    snakefile.print_results(workflow)


def models_of_all(wildcards):
    check(checks.check_choice)
    return expand(rules.merge.output, model=settings.models_of_all)


rule all:
    default_target: True
    input:
        # All results that people keep: a missing file is made again only if it is named.
        rules.report.input,
        rules.report.output,
        rules.merge_index.output if CORPUS else [],
        models_of_all,
