"""Runs training jobs on Slurm or here, through submitit: `python -m cluster.submit | status | logs | cancel`."""
