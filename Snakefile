# From a list of URLs to a trained GPT-2: `snakemake all`, or `snakemake --profile slurm all` on a cluster.
# Targets: all, corpus, dataset, train_<model>, merge_<model>, report. What each rule runs stands in workflow/rules/.


# --configfile FILE stands alone: Snakemake would merge it into config.yaml and mix two experiments.
if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/demo.smk"
include: "workflow/rules/dedup.smk"
include: "workflow/rules/corpus.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output,
