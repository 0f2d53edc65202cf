"""Only one job writes into a run folder: the one that started last.

RUN/owner.json names it. A job that Slurm gave up for dead may live on, and no lock of a network file system outlives
its node: so each newcomer simply takes the folder, and the one before it finds that out before it writes again.
"""

import os
import socket
import time
import uuid
from pathlib import Path

from common.errors import InputError, TrainingError
from common.files import read_json, write_json
from training.distributed import gathered

_INTERVAL = 5.0  # seconds between two looks while training


class Owner:
    """The claim of this job on a run folder; rank 0 makes it and looks after it."""

    def __init__(self, folder: Path, rank: int, job: str) -> None:
        self.path, self.rank = folder / "owner.json", rank
        self.claim = {"job": job, "host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
        self._looked = time.monotonic()
        self._lost = False

    def take(self) -> None:
        """Make the folder this job's, whoever had it."""
        if self.rank == 0:
            write_json(self.path, self.claim)

    def _other(self) -> dict[str, object] | None:
        """The claim of another job; None while the folder is ours."""
        try:
            claim: dict[str, object] = read_json(self.path)
        except InputError:
            return None  # removed by hand: nobody else's
        return claim if claim.get("token") != self.claim["token"] else None

    def lost(self) -> bool:
        """Whether another job has the folder, as of some seconds ago."""
        now = time.monotonic()
        if not self._lost and now - self._looked >= _INTERVAL:
            self._looked = now
            self._lost = self._other() is not None
        return self._lost

    def check(self) -> None:
        """TrainingError on all ranks when another job has the folder: before a checkpoint (a collective call)."""
        if any(gathered(self.rank == 0 and self._other() is not None)):
            raise self.gone()

    def gone(self) -> TrainingError:
        """What to raise when another job has the folder."""
        other = self._other() or {}
        who = f"job {other.get('job')} (process {other.get('pid')} on {other.get('host')})"
        return TrainingError(f"{self.path}: {who} has taken over this run; this one ends without saving")

    def leave(self) -> None:
        """At the end: the folder is nobody's again, unless it is another's already."""
        if self.rank == 0 and self._other() is None:
            self.path.unlink(missing_ok=True)
