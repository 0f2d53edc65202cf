"""Stop a training job: it finishes its step, saves a checkpoint and ends.

    python -m cluster.cancel results/demo/models/tiny
    python -m cluster.cancel results/demo/models/tiny --now

A job that waits in the queue is removed from it. `--now` does not wait for the step and the
checkpoint: Slurm sends SIGTERM, and SIGKILL after its KillWait; without Slurm it is 10 seconds. A
cancelled job stays cancelled: `cluster.submit --wait` and Snakemake end with an error, and only a
person can submit it again.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from cluster import jobs, slurm
from cluster.jobs import ASKED, FINAL, Job, State
from common import cli
from common.errors import JobError
from common.progress import Ticker
from training.model_folder import checkpoint_folders, stop_file

_KILL_WAIT = 10.0  # seconds between SIGTERM and SIGKILL


def cancel(folder: Path, job: Job, now: bool = False) -> State:
    """Stop the job of a model folder, and wait for its end; returns its final state.

    Raises JobError if it must be cancelled through the controller, which does not answer.
    """
    last_action, ticker = "", Ticker()
    for state, queued in jobs.states(folder, job):
        if state.state in FINAL:
            break
        pending = queued is not None and queued.state == "PENDING"
        action = "removing it from the queue" if pending else "ending it at once"
        if not (pending or now):
            action = "waiting until it has finished its step and saved"
            stop_file(folder).touch()  # also if it was requeued since
        if action != last_action:
            print(f"{folder.name}: job {job.id} {state}; {action}", flush=True)
            if pending or now:
                _kill_recorded(folder, job)
        last_action = action
        ticker.show(partial(jobs.progress, folder, job, state))
    stop_file(folder).unlink(missing_ok=True)  # the job ended before it saw the file, which would stop the next one
    if not state.time:
        if state.state == "failed":
            state = replace(state, state="cancelled", reason=ASKED)
        state = jobs.write_state(folder, state)
    return state


def _kill_recorded(folder: Path, job: Job) -> None:
    """Cancel a job, and record that first, so that the job is not requeued when it ends."""
    before = jobs.read_state(folder, job) or State(job.id, "queued")
    jobs.write_state(folder, replace(before, state="cancelled", reason=ASKED))
    try:
        kill(job)
    except JobError:
        jobs.write_state(folder, before)
        raise


def kill(job: Job) -> None:
    """Cancel a job as scancel does; a local one with all its processes.

    Raises JobError if Slurm's controller refuses.
    """
    if job.executor == "slurm":
        slurm.cancel([job.id])
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(job.id))
        processes = [*process.children(recursive=True), process]
        for child in processes:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(processes, _KILL_WAIT)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, 0 also if there was nothing to cancel."""
    parser = cli.parser("cluster.cancel", __doc__)
    parser.add_argument("folder", type=cli.input_path, metavar="MODEL_FOLDER", help="model folder of the job")
    parser.add_argument("--now", action="store_true", help="do not wait for a checkpoint")
    arguments = parser.parse_args(argv)
    folder = jobs.require_folder(arguments.folder)
    job = jobs.read_job(folder)
    if job is None:
        print(f"{folder.name}: no job was submitted for it")
        return 0
    before = jobs.current_state(folder, job, jobs.query_jobs([job]).get(job.id))
    if before.state in FINAL:
        print(f"{folder.name}: nothing to cancel, job {job.id} is not alive: {before}")
        return 0
    state = cancel(folder, job, arguments.now)
    newest = next(iter(checkpoint_folders(folder)), None)
    saved = f"its newest checkpoint is {newest.name}" if newest else "it has no checkpoint"
    print(f"{folder.name}: job {job.id} {state}; {saved}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
