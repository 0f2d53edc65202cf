"""Only one job writes into a run folder: the one that started last.

RUN/owner.json names it. A job that Slurm gave up for dead may live on, and no lock of a network file system outlives
its node: so each newcomer simply takes the folder, and the one before it finds that out before it writes again.
"""

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from common.errors import InputError, TrainingError
from common.files import read_json, write_json
from training.parallel.collectives import all_gather

_INTERVAL = 1.0  # seconds between two looks while training


class RunClaim:
    """The claim of this job on a run folder; rank 0 makes it and looks after it.

    token       differs between two jobs, equal on all ranks: what unfinished files of this job have in their names
    """

    def __init__(self, folder: Path, rank: int, job: str) -> None:
        self.path, self.rank = folder / "owner.json", rank
        self.job, self.token = job, uuid.uuid4().hex[:12]
        self._looked = time.monotonic()
        self._lost = False

    def take(self) -> None:
        """Make the folder this job's, whoever had it (a collective call)."""
        self.token = all_gather(self.token)[0]
        if self.rank == 0:
            claim = {"job": self.job, "host": socket.gethostname(), "pid": os.getpid(), "token": self.token}
            write_json(self.path, claim)

    def _other(self) -> dict[str, Any] | None:
        """The claim of another job, empty where that one has left again; None while the folder is ours."""
        try:
            claim = read_json(self.path)
        except InputError:
            return {}
        except OSError:
            return None  # a network folder that is away says nothing about the job
        if not isinstance(claim, dict):
            return {}
        return claim if claim.get("token") != self.token else None

    def mine(self) -> bool:
        """Whether the folder is still this job's (rank 0): what a job asks before it touches a file that two share."""
        return self._other() is None

    def require(self) -> None:
        """TrainingError when another job has the folder (rank 0 only, from any thread)."""
        other = self._other()
        if other is not None:
            raise self._gone(other)

    def lost(self) -> bool:
        """Whether another job has the folder, as of some seconds ago."""
        now = time.monotonic()
        if not self._lost and now - self._looked >= _INTERVAL:
            self._looked = now
            self._lost = not self.mine()
        return self._lost

    def check(self) -> None:
        """TrainingError on all ranks when another job has the folder (a collective call)."""
        other = all_gather(self._other() if self.rank == 0 else None)[0]
        if other is not None:
            raise self._gone(other)

    def _gone(self, other: dict[str, Any]) -> TrainingError:
        if not other:
            return TrainingError(f"{self.path}: removed, by another job at its end or by hand; this one ends here")
        who = f"job {other.get('job')} (process {other.get('pid')} on {other.get('host')})"
        return TrainingError(f"{self.path}: {who} has taken over this run; this one ends without saving")

    def leave(self) -> None:
        """At the end: the folder is nobody's again, unless it is another's already."""
        if self.rank == 0 and self.mine():
            self.path.unlink(missing_ok=True)
