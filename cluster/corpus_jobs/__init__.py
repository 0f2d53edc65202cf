"""Snakemake's executor `slurm-batch`, which packs the shards of a step into few Slurm jobs."""
