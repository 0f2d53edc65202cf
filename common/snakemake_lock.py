"""Removes Snakemake's lock of a working folder when its owner is dead, so that a killed run can be started again.

kill -9, SIGHUP and a power loss leave the lock in .snakemake/locks. Every run records itself there as
.snakemake/owners/HOST.PID.json, with the start time of the process, because process ids are used again. A lock is
removed only if all recorded owners are dead processes of this host, and only if it is not older than their records: a
lock on another host, or of another workflow, is left to Snakemake, which refuses to start.

Two runs may start at once. From here until Snakemake has its lock (`onstart`) a run holds .snakemake/starting, and the
other one waits for it; without that, it could remove the lock that the first one has just taken.
"""

import atexit
import fcntl
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from common.console import note
from common.errors import InputError
from common.files import read_json, write_json

FOLDER = Path(".snakemake")
WAIT = 600.0  # seconds: planning 10,000 shards takes one or two minutes
_CLOCK = 2.0  # seconds by which a start time may differ between two readings
# Commands of Snakemake that run no job
_NO_RUN = {
    *("--unlock", "--nolock", "--lint", "--summary", "-S", "--detailed-summary", "-D", "--dag", "--rulegraph"),
    *("--filegraph", "--d3dag", "--list", "--list-rules", "-l", "--list-target-rules", "--lt", "--report", "--archive"),
    *("--list-changes", "--lc", "--list-input-changes", "--li", "--list-params-changes", "--lp", "--list-untracked"),
    *("--lu", "--delete-all-output", "--delete-temp-output", "--cleanup-metadata", "--cm", "--print-compilation"),
    *("--dry-run", "--dryrun", "-n", "--containerize", "--generate-unit-tests"),
}

_starting: list[IO[bytes]] = []  # the open file that holds back other starts


@dataclass(frozen=True)
class Owner:
    """A run that may own a lock."""

    path: Path
    """The file that records it."""
    host: str
    pid: int
    started: float
    """Seconds since 1970."""

    def is_dead(self) -> bool:
        """Whether the process has ended; False for one of another host, where nobody here can know."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > _CLOCK
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def runs_jobs(arguments: Sequence[str]) -> bool:
    """Whether Snakemake's command line asks for a run, not for a plan, a list or a drawing."""
    return not any(argument.partition("=")[0] in _NO_RUN for argument in arguments)


def begin(folder: Path = FOLDER, wait: float = WAIT) -> None:
    """Wait for other starts, remove the lock of a dead owner, and record this process as the next one.

    Raises InputError if another start takes longer than `wait` seconds. Call `has_lock` when Snakemake has its lock.
    """
    folder.mkdir(exist_ok=True)
    file = open(folder / "starting", "ab")  # noqa: SIM115  held until has_lock or the end of the process
    try:
        _wait_for(file, wait)
    except BaseException:
        file.close()
        raise
    _starting.append(file)
    remove_dead_lock(folder)
    record = folder / "owners" / f"{socket.gethostname()}.{os.getpid()}.json"
    started = psutil.Process().create_time()
    write_json(record, {"host": socket.gethostname(), "pid": os.getpid(), "started": started})
    atexit.register(_forget, record, os.getpid())


def has_lock() -> None:
    """Snakemake has its lock: let other starts go on."""
    while _starting:
        _starting.pop().close()


def remove_dead_lock(folder: Path = FOLDER) -> bool:
    """Remove the lock files of dead owners, and their records. Returns whether there was a lock to remove."""
    owners, locks = read_owners(folder), list((folder / "locks").glob("*.lock"))
    if not locks:
        for owner in owners:  # of runs that were killed, and unlocked since
            owner.path.unlink(missing_ok=True)
        return False
    if not owners or not all(owner.is_dead() for owner in owners):
        return False
    recorded = min(owner.path.stat().st_mtime for owner in owners)
    removed = [lock for lock in locks if lock.stat().st_mtime >= recorded]
    for path in (*removed, *(owner.path for owner in owners)):
        path.unlink(missing_ok=True)
    if removed:
        dead = ", ".join(str(owner.pid) for owner in owners)
        note(f"{folder / 'locks'}: removed the lock of a Snakemake that was killed (process {dead})")
    return bool(removed)


def read_owners(folder: Path = FOLDER) -> list[Owner]:
    """The recorded runs of a working folder; a damaged record counts as one of an unknown host."""
    owners = []
    for path in sorted((folder / "owners").glob("*.json")):
        try:
            found = read_json(path)
            owners.append(Owner(path, str(found["host"]), int(found["pid"]), float(found["started"])))
        except FileNotFoundError:  # that run has just ended
            continue
        except (InputError, KeyError, TypeError, ValueError):
            owners.append(Owner(path, "", 0, 0.0))
    return owners


def _wait_for(file: IO[bytes], wait: float) -> None:
    """Lock an open file, or wait for the process that has it."""
    deadline, told = time.monotonic() + wait, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                note("another Snakemake is starting in this folder; waiting until it has its lock")
                told = True
            if time.monotonic() > deadline:
                raise InputError(
                    f"{file.name}: another Snakemake has been starting here for {wait:.0f} s; stop it first"
                ) from None
            time.sleep(0.2)
        except OSError:  # the file system has no locks: Snakemake's own are left
            return
        else:
            return


def _forget(record: Path, pid: int) -> None:
    """At the end of the process; not in a child that was forked from it."""
    if os.getpid() == pid:
        record.unlink(missing_ok=True)
