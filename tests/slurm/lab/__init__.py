"""A throw-away Slurm on this machine: `slurm(folder)` starts one, a `Lab` runs commands in it and
breaks it on purpose.

`python -m tests.slurm.lab -- COMMAND` is the same for people. Everything runs on loopback, in one
folder and in a mount namespace of its own, and is found and ended by process id: several labs run
side by side.
"""

from tests.slurm.lab.cluster import Lab, missing, slurm

__all__ = ["Lab", "missing", "slurm"]
