"""Locks of Snakemake processes that are killed, alive, of another host, and started at once."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common import snakemake_lock
from common.files import write_json
from tests.conftest import ROOT

# As in our Snakefile: begin when it is parsed, has_lock when the run starts.
SNAKEFILE = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from common import snakemake_lock
if workflow.is_main_process and not workflow.output_settings.dryrun and snakemake_lock.runs_jobs(sys.argv[1:]):
    snakemake_lock.begin()
onstart: snakemake_lock.has_lock()
rule all:
    output: "x"
    shell: "echo $$ >> runs; until [ -e go ]; do sleep 0.1; done; touch x"
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-incomplete"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, process_group=0)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill Snakemake alone, then the jobs that it left."""
    jobs = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for job in jobs:
        try:
            job.kill()
        except psutil.NoSuchProcess:
            continue
    process.communicate()  # jobs have its pipe open, too


def test_a_live_run_keeps_its_lock_and_of_two_starts_after_it_was_killed_one_runs(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    locks, runs = tmp_path / ".snakemake/locks", tmp_path / "runs"
    first = start(tmp_path)
    try:
        wait_until(runs.exists)
    finally:
        kill(first)
    assert list(locks.glob("*.lock")), "the lock is still there"
    runs.unlink()
    both = [start(tmp_path), start(tmp_path)]
    wait_until(lambda: runs.exists() and any(process.poll() is not None for process in both))
    (refused,) = [process for process in both if process.poll() is not None]
    (live,) = [process for process in both if process is not refused]
    assert list(locks.glob("*.lock"))
    (tmp_path / "go").touch()
    ends = [process.communicate(timeout=200)[1] for process in (live, refused)]
    assert live.returncode == 0 and refused.returncode == 1 and "cannot be locked" in ends[1], ends
    assert len(runs.read_text().split()) == 1, ends
    assert ["removed the lock" in errors for errors in ends] == [True, False]
    assert not list(locks.glob("*.lock")) and not list((tmp_path / ".snakemake/owners").iterdir())


HERE, OURS = socket.gethostname(), os.getpid()


@pytest.mark.parametrize(
    ("host", "age", "record", "removed"),
    [
        ("elsewhere", 0, None, False),  # may be alive
        (HERE, 0, None, False),  # this process
        (HERE, 100, None, True),  # a process that has got the number of a dead one
        (HERE, 100, "{", False),  # a damaged record
        (None, 0, None, False),  # no record
        (HERE, 100, "older", False),  # the lock of another workflow
    ],
)
def test_only_the_lock_of_a_dead_process_of_this_host_is_removed(
    tmp_path: Path, host: str | None, age: int, record: str | None, removed: bool
) -> None:
    owner, lock = tmp_path / "owners/a.json", tmp_path / "locks/0.output.lock"
    if host:
        write_json(owner, {"host": host, "pid": OURS, "started": psutil.Process().create_time() - age})
    lock.parent.mkdir()
    lock.write_text("x\n")
    if record == "older":
        os.utime(lock, (1, 1))
    elif record:
        owner.write_text(record)
    assert snakemake_lock.remove_dead_lock(tmp_path) == removed
    assert lock.exists() != removed and (record == "older" or owner.exists() == (host is not None and not removed))
