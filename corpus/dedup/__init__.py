"""Deduplication in phases, each of which fits one Slurm job: `python -m corpus.dedup`, docs/dedup.md."""
