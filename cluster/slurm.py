"""Calls Slurm's commands: sbatch, squeue, scancel, scontrol. Nothing here needs accounting.

`queue` returns None if the controller does not answer; callers ask again later.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InputError, JobError
from common.settings import SiteSettings

SBATCH = ("sbatch", "--parsable")
SILENT = "the Slurm controller does not answer"
HIDDEN = "Slurm does not show another user's job (PrivateData); if it has ended, remove its job.json"
UNKNOWN = "UNKNOWN"
"""The state of a job if the controller does not answer, or hides the job."""
TIMEOUT = 30.0  # seconds for one command; a busy controller may need several
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
# With these reasons a job waits until a person acts. Limits of a group or a user pass in time.
_UNSCHEDULABLE = re.compile(
    r"Partition(Node|Time)Limit|PartitionConfig|Invalid(Account|QOS)|BadConstraints|(Assoc|QOS)Max\w*PerJob(Limit)?"
    r"|QOSMin\w*|\w*NotAllowed|ReservationDeleted|DependencyNeverSatisfied|JobHoldMaxRequeue"
)
_ORDINARY = ("None", "Priority", "Resources", "BeginTime", "Cleaning", "Prolog")  # reasons that are no news
# What to change, by Slurm's reason for refusing or never starting a job; the first match counts.
_CURES = {
    r"partition (name|specified)|inactive": "cluster.partition",
    r"account(?!ing)": "cluster.account",  # also "account/partition combination"
    r"wall|accounting/qos policy": "the time limit ({time_limit}), or cluster.qos",
    r"qos": "cluster.qos",
    r"reservation": "cluster.reservation",
    r"feature|constraint": "cluster.constraint",
    r"array": "cluster.corpus.max_tasks",
    r"time": "the time limit ({time_limit}), or cluster.partition",
    r"partition": "the time limit ({time_limit}), the number of nodes, or cluster.partition",
    r"node|processor|cpu|memory|gres": "what it asks of a node: GPUs, CPUs, memory (cluster.*), or cluster.partition",
}
_TOO_MANY = re.compile(r"submit\w*limit", re.I)  # AssocMaxSubmitJobLimit, QOSGrpSubmitJobsLimit, …
_BUSY = re.compile(r"timed out|unable to contact|temporarily|connection (refused|reset)|try again", re.I)
_TIME_LIMIT = "time_limit_minutes"  # the key of a training job's
_FORMAT = "%i|%T|%r|%N|%j"  # the name last: it may contain anything
_EXCLUDE = "--exclude="
_SITE_KEYS = ("partition", "account", "qos", "constraint", "reservation")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_WCKEY"})


class RefusedError(InputError):
    """sbatch refused a job, for the reason in the first line of its errors."""

    def __init__(self, errors: str, time_limit: str = _TIME_LIMIT) -> None:
        self.reason = _reason(errors)
        self.too_many = _TOO_MANY.search(self.reason) is not None
        """The user has too many jobs queued: fewer may be accepted now, the rest later."""
        self.passes = self.too_many or _BUSY.search(self.reason) is not None
        what = SILENT if self.passes and not self.too_many else "Slurm refused the job"
        self.what = f"{what}: {self.reason}"
        """What happened, without the cure."""
        super().__init__(self.what + ("; submit it again later" if self.passes else cure(self.reason, time_limit)))


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
    def unschedulable(self) -> bool:
        """Whether it waits for something that does not come by itself."""
        return self.state == "PENDING" and _UNSCHEDULABLE.fullmatch(self.reason.strip("()")) is not None


def environment(site: SiteSettings | None = None) -> dict[str, str]:
    """The environment for Slurm's commands, and so for the jobs that sbatch submits.

    Variables that filter, format or change what the commands do are left out: SQUEUE_*,
    SBATCH_EXPORT, SLURM_TIME_FORMAT, what an outer job sets, and the like. Kept are the variables
    that find the controller, and SBATCH_PARTITION, _ACCOUNT, _QOS, _CONSTRAINT, _RESERVATION and
    _WCKEY, which sites tell people to set; they would win over the batch script, so those that
    `site` decides are left out, too.
    """
    kept = _KEPT | {f"SBATCH_{key.upper()}" for key in _SITE_KEYS if not getattr(site, key, "")}
    others = ("SQUEUE_", "SBATCH_", "SCANCEL_", "SCONTROL_", "SLURM_")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(others)}


def _run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str] | None":
    """Run a command; None if it does not answer in time. Raises InputError if it is missing."""
    try:
        options = {"timeout": TIMEOUT, "env": environment(), **options}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError:
        raise InputError(
            f"{command[0]}: no such command; run this on a login node, or set cluster.executor: local"
        ) from None


def queue(ids: Iterable[str] = (), name: str = "", timeout: float = 0) -> list[QueuedJob] | None:
    """The jobs with these ids, or the user's jobs called `name`; None: the controller is silent.

    Finished jobs are included as long as the controller remembers them (MinJobAge). `timeout`: 0 is
    TIMEOUT.
    """
    asked = list(ids)
    if not asked and not name:
        return []
    which = [f"--jobs={','.join(asked)}"] if asked else [f"--user={os.getuid()}", f"--name={name}"]
    command = ["squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}", *which]
    answer = _run(command, timeout=timeout or TIMEOUT)
    if answer is None:
        return None
    if answer.returncode:
        # one unknown id is an error, several are not
        return [] if "invalid job id" in answer.stderr.lower() else None
    rows = (line.split("|", 4) for line in answer.stdout.splitlines() if line.count("|") >= 4)
    return [QueuedJob(id, name, state, reason, nodes) for id, state, reason, nodes, name in rows]


def hides_jobs() -> bool:
    """Whether squeue hides other users' jobs (PrivateData=jobs); True if the controller is
    silent.
    """
    answer = _run(["scontrol", "show", "config"])
    private = re.search(r"^PrivateData\s*=(.*)", answer.stdout, re.MULTILINE) if answer else None
    return private is None or "jobs" in private[1]


def unknown(ids: Iterable[str], reason: str = SILENT) -> dict[str, QueuedJob]:
    """These jobs in the state UNKNOWN, by id."""
    return {number: QueuedJob(number, "", UNKNOWN, reason, "") for number in ids}


def details(job: str) -> dict[str, str] | None:
    """What `scontrol show job` prints, by key; None if it fails or does not answer."""
    answer = _run(["scontrol", "--oneliner", "show", "job", job])
    if answer is None or answer.returncode:
        return None
    return _pairs(answer.stdout)


def _pairs(line: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def cores_per_gpu(gres: str, gpus: int, partition: str) -> int:
    """The smallest number of cores per GPU on any node with at least `gpus` GPUs.

    At least 1, also if Slurm does not answer. `partition`: one or several; empty: all nodes.
    """
    try:
        answer = _run(["scontrol", "--oneliner", "show", "node"])
    except InputError:  # not a login node
        answer = None
    pattern = re.compile(rf"\b{re.escape(gres)}(?::[^:,()]+)?:(\d+)")  # gpu:8, gpu:h100:8(S:0-1)
    shares = []
    for node in map(_pairs, answer.stdout.splitlines() if answer else ()):
        count = sum(map(int, pattern.findall(node.get("Gres", ""))))
        if count >= gpus and (not partition or {*partition.split(",")} & {*node.get("Partitions", "").split(",")}):
            shares.append(int(node.get("CPUEfctv") or node["CPUTot"]) // count)
    return max(1, min(shares, default=1))


def idle_nodes(partition: str) -> int:
    """The number of idle nodes of a partition that accept jobs; 0 if Slurm does not answer."""
    answer = _run(["scontrol", "--oneliner", "show", "node"])
    nodes = map(_pairs, answer.stdout.splitlines() if answer else ())
    return sum(node.get("State") == "IDLE" and partition in node.get("Partitions", "").split(",") for node in nodes)


def set_nodes(job: str, nodes: int) -> bool:
    """Change how many nodes a job of one task per node asks for; returns whether Slurm did."""
    cpus = int((details(job) or {}).get("CPUs/Task", "1"))
    answer = _run(["scontrol", "update", f"JobId={job}", f"NumNodes={nodes}", f"NumCPUs={nodes * cpus}"])
    return answer is not None and answer.returncode == 0


def interrupt(job: str) -> None:
    """Have a job save, exit and be requeued. Raises JobError if Slurm refuses."""
    _cancel(["--signal=USR2", job])


def seconds(limit: str) -> float:
    """Seconds of Slurm's [DAYS-]HH:MM:SS; infinite for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue(job: str) -> bool:
    """Requeue a running or ended job under the same id; returns whether the controller did."""
    answer = _run(["scontrol", "requeue", job])
    return answer is not None and answer.returncode == 0


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs. Raises JobError if the controller refuses."""
    _cancel(jobs)


def _cancel(arguments: Sequence[str]) -> None:
    answer = _run(["scancel", *arguments])
    if answer is None or answer.returncode:
        why = "the controller does not answer" if answer is None else _reason(answer.stderr)
        raise JobError(f"scancel {' '.join(arguments)}: {why}")


def submit(script: Path, time_limit: str = _TIME_LIMIT, site: SiteSettings | None = None) -> str:
    """Submit a batch script; returns the job id. Raises RefusedError with Slurm's reason.

    Ctrl-C and hang-ups do not reach sbatch. `time_limit`: the key of the job's time limit. `site`:
    see `environment`.
    """
    answer = _run([*SBATCH, str(script)], timeout=None, env=environment(site), start_new_session=True)
    assert answer is not None  # it has no time limit
    if answer.returncode:
        raise RefusedError(answer.stderr, time_limit)
    return job_id(answer.stdout)


def job_id(printed: str) -> str:
    """The id in what SBATCH printed: ID, or ID;CLUSTER where there are several clusters.

    A site's wrapper prints more, usually before it: the last line that could be one counts. Raises
    InputError if there is none.
    """
    numbers = re.findall(r"^(\d+)(?:;.*)?$", printed, re.MULTILINE)
    if not numbers:
        raise InputError(f"sbatch printed no job id but {printed.strip()!r}; run the same command again")
    return str(numbers[-1])


def _reason(errors: str) -> str:
    """The first error that a command printed: later lines are more general."""
    lines = [line for line in errors.splitlines() if re.search(r"\w", line)]
    first = next((line for line in lines if "error: " in line), lines[0] if lines else "no reason given")
    return re.sub(r"^\s*(\w+: )?(error: )?(Batch job submission failed: )?", "", first).strip()


def cure(reason: str, time_limit: str = _TIME_LIMIT) -> str:
    """`; change KEY` for a reason that Slurm gave; empty if no key helps."""
    keys = next((keys for pattern, keys in _CURES.items() if re.search(pattern, reason, re.I)), "")
    return f"; change {keys.format(time_limit=time_limit)}" if keys else ""


def never_starts(job: QueuedJob, time_limit: str = _TIME_LIMIT) -> str:
    """Why an unschedulable job does not start, and what to change."""
    return f"Slurm would never start it: {job.reason.strip('()')}{cure(job.reason, time_limit)}"


def not_yet(job: QueuedJob) -> str:
    """Why a job waits for more than its turn, and what a person may do; else empty."""
    if job.state != "PENDING" or job.reason in _ORDINARY:
        return ""
    release = f"; scontrol release {job.id} starts it" if re.search("JobHeldUser|requeued", job.reason) else ""
    return f"Slurm does not start job {job.id} yet: {job.reason}{release}"


def site_options(site: SiteSettings, avoided: Iterable[str] = ()) -> list[str]:
    """sbatch's options for the site's settings that are not empty. `avoided`: nodes to exclude."""
    options = [f"--{key}={getattr(site, key)}" for key in _SITE_KEYS if getattr(site, key)]
    # sbatch takes the last of several
    excluded = [option.removeprefix(_EXCLUDE) for option in site.sbatch if option.startswith(_EXCLUDE)]
    own = [f"{_EXCLUDE}{','.join([*excluded, *avoided])}"] if [*avoided] else []
    return [*options, *["--exclusive"] * site.exclusive, *site.sbatch, *own]
