"""Two things that Snakemake does to failed jobs and this workflow must not: see `keep_results` and `stop_on_bad_input`.

Snakemake has no options for them, so its methods are replaced when the Snakefile is parsed.
"""

import os
from typing import Any

BAD_INPUT = 2
"""Exit code of a command whose input or settings are wrong: a second attempt would end the same."""


def give_up(job: Any) -> None:
    """Make the current attempt of a job its last; Snakemake compares the attempt with `retries`."""
    job.attempt = job.restart_times + 1


def keep_results() -> None:
    """Keep the files of an earlier run until a job replaces them, and all of them if it fails.

    Snakemake removes the outputs of a job before it starts and after it fails, for commands that leave half a file.
    Ours write a result whole or not at all. Only the outputs of `train` are removed: done.json says that it ended.
    """
    from snakemake.jobs import Job

    remove, finish = Job.remove_existing_output, Job.postprocess

    async def remove_existing_output(job: Any) -> None:
        if job.rule.name == "train":
            await remove(job)

    async def postprocess(job: Any, *arguments: Any, error: bool = False, **named: Any) -> None:
        if error:
            _forget_start(job)
        else:
            await finish(job, *arguments, **named)

    Job.remove_existing_output, Job.postprocess = remove_existing_output, postprocess


def _forget_start(job: Any) -> None:
    """Unmark the outputs that a failed job has not replaced: they are as complete as before, and so are their records.

    The others stay marked as incomplete, so the next run makes them again.
    """
    records = job.dag.workflow.persistence
    for path in job.output:
        started = records._get_recorded_starttime(records._get_key(path))
        if started is None or not os.path.exists(path) or os.path.getmtime(path) < started:
            records._unmark_incomplete(records._get_key(path))


def stop_on_bad_input() -> None:
    """Make Snakemake's own executor, which runs jobs on this machine, start no second attempt after exit code 2."""
    from snakemake.executors.local import Executor

    report = Executor._callback

    def callback(executor: Any, info: Any, future: Any) -> None:
        cause = getattr(future.exception(), "__context__", None)  # the CalledProcessError of the command
        if getattr(cause, "returncode", None) == BAD_INPUT:
            give_up(info.job)
        report(executor, info, future)

    Executor._callback = callback
