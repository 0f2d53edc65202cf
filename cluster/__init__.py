"""Training jobs on Slurm or this machine, through submitit.

`python -m cluster.submit | status | logs | cancel`

`TrainingJob` is the callable that such a job runs, for executors of submitit.
"""

from cluster.training_job import TrainingJob as TrainingJob
