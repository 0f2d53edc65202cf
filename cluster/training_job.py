"""The callable that each process of a training job runs, for submitit's executors.

    from cluster import TrainingJob
    executor.submit(TrainingJob("config.yaml", "tiny"))

`cluster.submit` gives it an executor of its own (`cluster.submission`); docs/slurm.md shows one of
yours. It is pickled by reference: the process imports this module from its PYTHONPATH, and the
settings from the named file.
"""

from dataclasses import dataclass
from pathlib import Path

from submitit.helpers import DelayedSubmission

from common import cli


@dataclass(frozen=True)
class TrainingJob:
    """Trains one model as one of the job's processes, whose rank comes from the environment.

    Exits as `python -m training.train` does: 0, 2 for an error that must be cured first, 75 to be
    resumed.
    """

    config: str
    """Path of a configuration."""
    model: str
    """Its model to train."""
    requeue: bool = True
    """Whether rank 0 requeues the job after a time limit or a preemption.

    False: the batch script does it, which outlives the ranks.
    """

    def __call__(self) -> None:
        """Train, in a process that submitit started. Raises SystemExit with an exit code other than
        0.
        """
        from training.launch.signals import leave_at_once

        # From here on, signals are ours: submitit's handlers would requeue the job without a
        # checkpoint. submitit passes SystemExit on, so the exit code reaches srun.
        leave_at_once()
        if code := cli.run(self.run, signals=False):
            if self.requeue:
                self._end(code)
            raise SystemExit(code)

    def run(self) -> int:
        """Train; returns the exit code."""
        from training.train import main

        self._begin()
        return main(["--config", self.config, "--model", self.model])

    def checkpoint(self) -> DelayedSubmission:
        """For submitit, if it gets the signal before this process does: the same job again."""
        return DelayedSubmission(self)

    def _begin(self) -> None:
        """Record that the training runs, also if Slurm itself has requeued it."""
        from cluster import jobs
        from common.config import load_settings
        from training.launch.rank import read_launch

        launch = read_launch()
        if launch.launcher in ("slurm", "submitit") and launch.rank == 0:
            jobs.write_running(load_settings(Path(self.config)).model_folder(self.model).resolve(), launch.key)

    def _end(self, code: int) -> None:
        from cluster import job_end
        from common.config import load_settings
        from training.launch.rank import read_launch

        launch = read_launch()
        if launch.launcher == "slurm" and launch.rank == 0:
            settings = load_settings(Path(self.config))
            folder, restarts = settings.model_folder(self.model).resolve(), settings.cluster.max_restarts
            words = ["--folder", str(folder), "--code", str(code), "--max-restarts", str(restarts)]
            cli.run(lambda: job_end.main(words), signals=False)


@dataclass(frozen=True)
class TrialJob(TrainingJob):
    """Measures one layout with `training.trial`, for `cluster.autotune`; never requeued."""

    requeue: bool = False
    steps: int = 5
    output: str = ""
    """File that gets the result."""

    def run(self) -> int:
        """Measure; returns the exit code."""
        from common.config import load_settings
        from training.trial import run_trial

        run_trial(load_settings(Path(self.config)), self.model, self.steps, Path(self.output))
        return 0
