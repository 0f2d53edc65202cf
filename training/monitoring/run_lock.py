"""The lock on a model folder: only one job writes there, the one that started last.

MODEL_FOLDER/owner.json names it. A job that Slurm has given up for dead may still be alive, and a
lock on a network file system does not survive its node. So each new job simply takes the folder,
and the job that had it notices before it writes again.
"""

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from common.errors import InputError, LostLockError
from common.files import read_json, write_json
from training.parallel.collectives import all_gather

_INTERVAL = 1.0  # seconds between two reads of the file while training


class RunLock:
    """This job's lock on a model folder; rank 0 takes it and checks it."""

    def __init__(self, folder: Path, rank: int, job: str) -> None:
        self.path, self.rank = folder / "owner.json", rank
        self.job = job
        self.token = uuid.uuid4().hex[:12]  # equal on all ranks once taken; names this job's unfinished files
        self._polled = time.monotonic()
        self._lost = False

    def take(self) -> None:
        """Take the folder, whichever job had it before (a collective call)."""
        self.token = all_gather(self.token)[0]
        if self.rank == 0:
            owner = {"job": self.job, "host": socket.gethostname(), "pid": os.getpid(), "token": self.token}
            write_json(self.path, owner)

    def release(self) -> None:
        """Remove the lock at the end of the job, unless another job has the folder."""
        if self.rank == 0 and self.is_held():
            self.path.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Whether the folder is this job's (rank 0): asked before writing files that jobs share."""
        return self._other_owner() is None

    def require(self) -> None:
        """Raises LostLockError if another job has the folder (rank 0 only, from any thread)."""
        self._check(self._other_owner())

    def require_on_all_ranks(self) -> None:
        """Raises LostLockError on all ranks if another job has the folder (a collective call)."""
        self._check(all_gather(self._other_owner() if self.rank == 0 else None)[0])

    def poll(self) -> bool:
        """Read the file at most once per second; returns whether another job has the folder."""
        now = time.monotonic()
        if not self._lost and now - self._polled >= _INTERVAL:
            self._polled = now
            self._lost = not self.is_held()
        return self._lost

    def _other_owner(self) -> dict[str, Any] | None:
        """The job that has taken the folder, {} if that one has ended; None while it is ours."""
        try:
            owner = read_json(self.path)
        except InputError:
            return {}
        except OSError:
            return None  # an unreachable network folder says nothing about the lock
        if not isinstance(owner, dict):
            return {}
        return owner if owner.get("token") != self.token else None

    def _check(self, other: dict[str, Any] | None) -> None:
        if other is None:
            return
        if not other:
            raise LostLockError(f"{self.path}: removed, by another job at its end or by hand; this job ends here")
        who = f"job {other.get('job')} (process {other.get('pid')} on {other.get('host')})"
        raise LostLockError(f"{self.path}: {who} has taken over this run; this job ends without saving")
