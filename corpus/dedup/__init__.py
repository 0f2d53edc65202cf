"""Deduplication in five phases, each a Slurm job: `python -m corpus.dedup`, docs/dedup.md."""
