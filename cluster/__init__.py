"""Runs training jobs on Slurm or on this machine, through submitit: `python -m cluster.submit | status`."""
