"""Deduplication in five phases of Slurm jobs: `python -m corpus.dedup`, docs/dedup.md."""
