"""Slurm's commands, each called in one place: sbatch, squeue, scancel, scontrol. Nothing here needs accounting.

A controller that does not answer says nothing about a job: `queue` returns None, and callers ask again later.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InputError, JobError
from common.settings import SiteSettings

TIMEOUT = 30.0  # seconds for one command; a busy controller may need several
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
# Reasons for which a pending job waits until a person changes something. Limits of a group or a user pass in time.
_HOPELESS = re.compile(
    r"Partition(Node|Time)Limit|PartitionConfig|Invalid(Account|QOS)|BadConstraints|(Assoc|QOS)Max\w*PerJob(Limit)?"
    r"|QOSMin\w*|\w*NotAllowed|ReservationDeleted|DependencyNeverSatisfied|JobHoldMaxRequeue"
)
# What to change, by a word of Slurm's reason for refusing a job or for never starting it.
_CURES = {
    "partition name": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "reservation": "cluster.reservation",
    "feature": "cluster.constraint",
    "constraint": "cluster.constraint",
    "partition": "the time limit (time_limit_minutes), the number of nodes, or cluster.partition",
    "time": "the time limit (time_limit_minutes), or cluster.partition",
    "node configuration": "what it asks of a node: GPUs, CPUs, memory (cluster.*), or cluster.partition",
}
_FORMAT = "%i|%j|%T|%r|%N"


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one task of an array, as squeue shows it."""

    id: str
    """Job id; of a task of an array: ID_INDEX."""
    name: str
    state: str
    """Slurm's long name: PENDING, RUNNING, COMPLETING, REQUEUED, CANCELLED, …"""
    reason: str
    """Why it waits, in Slurm's words."""
    nodes: str

    @property
    def active(self) -> bool:
        """Whether it is queued, running or about to be requeued."""
        return self.state not in ENDED

    @property
    def hopeless(self) -> bool:
        """Whether it waits for something that does not come by itself."""
        return self.state == "PENDING" and _HOPELESS.fullmatch(self.reason.strip("()")) is not None


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str] | None":
    """Run a command; None if it does not answer in time."""
    try:
        return _call(command, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return None


def _call(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command; `options` are subprocess.run's. Raises InputError if this machine does not have it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except FileNotFoundError:
        raise InputError(
            f"{command[0]}: no such command; run this on a login node, or set cluster.executor: local"
        ) from None


def queue(ids: Iterable[str] = (), name: str = "") -> list[QueuedJob] | None:
    """The jobs with these ids, or the user's own jobs called `name`, in one call; None: the controller is silent.

    Finished jobs are included as long as the controller remembers them (MinJobAge).
    """
    asked = list(ids)
    if not asked and not name:
        return []
    which = [f"--jobs={','.join(asked)}"] if asked else [f"--user={os.getuid()}", f"--name={name}"]
    answer = _run(["squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}", *which])
    if answer is None:
        return None
    if answer.returncode:
        # one unknown id is an error, several are not
        return [] if "invalid job id" in answer.stderr.lower() else None
    rows = (line.split("|") for line in answer.stdout.splitlines())
    return [QueuedJob(*row) for row in rows if len(row) == 5]


def details(job: str) -> dict[str, str] | None:
    """What `scontrol show job` says about a job, by key; None if the controller is silent or has forgotten the job."""
    answer = _run(["scontrol", "--oneliner", "show", "job", job])
    if answer is None or answer.returncode:
        return None
    return dict(pair.split("=", 1) for pair in answer.stdout.split() if "=" in pair)


def max_array_size() -> int:
    """How many tasks an array may have on this site; 1,001, Slurm's default, if the controller is silent."""
    answer = _run(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout, re.MULTILINE) if answer else None
    return max(int(found[1]), 1) if found else 1001


def requeue(job: str) -> bool:
    """Put a running or ended job into the queue again, with the same id; returns whether the controller did it."""
    answer = _run(["scontrol", "requeue", job])
    return answer is not None and answer.returncode == 0


def cancel(jobs: Sequence[str], *options: str) -> None:
    """Cancel jobs, or signal them (`options`: --signal=TERM). Raises JobError if the controller refuses."""
    answer = _run(["scancel", *options, *jobs])
    if answer is None or answer.returncode:
        why = "the controller does not answer" if answer is None else _last_line(answer.stderr)
        raise JobError(f"scancel {' '.join(jobs)}: {why}")


def submit(script: Path, keep_open: Sequence[int] = ()) -> str:
    """Submit a batch script; returns the job id. Raises InputError with Slurm's reason in one line.

    Ctrl-C and hang-ups wait until sbatch has answered, so that a job that Slurm has accepted is always recorded.
    `keep_open`: file descriptors for sbatch to inherit, such as a lock that outlives a killed submitter.
    """
    deferred = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deferred)
    try:
        answer = _call(["sbatch", "--parsable", str(script)], pass_fds=keep_open)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if answer.returncode:
        reason = _last_line(answer.stderr)
        raise InputError(f"Slurm refused the job: {reason}{cure(reason)}")
    return answer.stdout.strip().splitlines()[-1].split(";")[0]  # ID;CLUSTER where there are several clusters


def _last_line(text: str) -> str:
    """The reason in sbatch's or scancel's output, without the command's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^(\w+: )?(error: )?(Batch job submission failed: )?", "", lines[-1]) if lines else "no reason given"


def cure(reason: str) -> str:
    """`; change KEY` for a reason that Slurm gave; empty for one that needs no change of the configuration."""
    keys = next((keys for word, keys in _CURES.items() if word in reason.lower()), "")
    return f"; change {keys}" if keys else ""


def never_starts(job: QueuedJob) -> str:
    """Why a hopeless job does not start, and what to change."""
    return f"Slurm would never start it: {job.reason}{cure(job.reason)}"


def site_options(site: SiteSettings) -> list[str]:
    """sbatch's options for what a site asks of a job; nothing for what is left empty."""
    named = ("partition", "account", "qos", "constraint", "reservation")
    options = [f"--{key}={getattr(site, key)}" for key in named if getattr(site, key)]
    return [*options, *["--exclusive"] * site.exclusive, *site.sbatch]
