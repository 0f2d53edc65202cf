"""Locks of real Snakemake processes that are killed, alive, of another host, and started at once."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common import snakemake_lock
from common.errors import InputError
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
    shell: "echo $$ >> runs; sleep 2; [ -e go ] || sleep 60; touch x"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    return tmp_path


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-incomplete", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, process_group=0)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def locks(folder: Path) -> list[Path]:
    return list((folder / ".snakemake" / "locks").glob("*.lock"))


def kill(process: "subprocess.Popen[str]", with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Kill Snakemake alone, then the jobs that it left."""
    jobs = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(with_signal)
    process.wait()
    for job in jobs:
        try:
            job.kill()
        except psutil.NoSuchProcess:
            continue
    process.communicate()  # jobs have its pipe open, too


def kill_a_run(folder: Path, with_signal: signal.Signals = signal.SIGKILL) -> None:
    process = start(folder)
    wait_until((folder / "runs").exists)
    kill(process, with_signal)
    assert locks(folder), "the lock is still there"
    (folder / "runs").unlink()
    (folder / "go").touch()


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGHUP])
def test_the_lock_of_a_killed_run_is_removed_by_the_next_one(folder: Path, with_signal: signal.Signals) -> None:
    kill_a_run(folder, with_signal)
    process = start(folder)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert errors.count("removed the lock of a Snakemake that was killed") == 1
    assert not locks(folder) and not list((folder / ".snakemake/owners").iterdir()), "a run that ends leaves nothing"


def test_a_plan_leaves_the_lock_alone(folder: Path) -> None:
    kill_a_run(folder)
    for arguments in (("-n",), ("-np",), ("--summary",)):
        process = start(folder, *arguments)
        _, errors = process.communicate(timeout=100)
        assert "removed the lock" not in errors and locks(folder), arguments


def test_the_lock_of_a_live_run_is_left_to_snakemake(folder: Path) -> None:
    first = start(folder)
    try:
        wait_until((folder / "runs").exists)
        second = start(folder)
        _, errors = second.communicate(timeout=100)
        assert second.returncode != 0 and "cannot be locked" in errors and "removed the lock" not in errors
        assert locks(folder) and first.poll() is None
    finally:
        kill(first)


def test_of_two_starts_at_once_after_a_kill_one_runs(folder: Path) -> None:
    kill_a_run(folder)
    both = [start(folder), start(folder)]
    ends = [process.communicate(timeout=200)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert len((folder / "runs").read_text().split()) == 1, ends
    # The later one is refused, or finds everything done.
    assert codes[0] == 0 and (codes[1] == 0 or any("cannot be locked" in errors for errors in ends)), ends
    assert sum("removed the lock" in errors for errors in ends) == 1


def record(folder: Path, host: str, pid: int, started: float) -> Path:
    path = folder / "owners" / f"{host}.{pid}.json"
    write_json(path, {"host": host, "pid": pid, "started": started})
    return path


def lock(folder: Path) -> Path:
    path = folder / "locks" / "0.output.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n")
    return path


def test_an_owner_on_another_host_may_be_alive(tmp_path: Path) -> None:
    record(tmp_path, "elsewhere", 1, 0.0)
    left = lock(tmp_path)
    assert not snakemake_lock.remove_dead_lock(tmp_path) and left.exists()


def test_a_lock_without_a_record_is_left_to_snakemake(tmp_path: Path) -> None:
    left = lock(tmp_path)
    assert not snakemake_lock.remove_dead_lock(tmp_path) and left.exists()
    path = record(tmp_path, socket.gethostname(), os.getpid(), 0.0)
    path.write_text("{")
    assert not snakemake_lock.remove_dead_lock(tmp_path) and left.exists(), "nor with a damaged record"


def test_a_lock_older_than_the_record_belongs_to_another_workflow(tmp_path: Path) -> None:
    left = lock(tmp_path)
    os.utime(left, (1, 1))
    record(tmp_path, socket.gethostname(), os.getpid(), 0.0)
    assert not snakemake_lock.remove_dead_lock(tmp_path) and left.exists()


def test_a_process_that_got_the_number_of_a_dead_one_owns_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = record(tmp_path, socket.gethostname(), os.getpid(), psutil.Process().create_time() - 100)
    left = lock(tmp_path)
    assert snakemake_lock.remove_dead_lock(tmp_path) and not left.exists() and not dead.exists()
    assert f"removed the lock of a Snakemake that was killed (process {os.getpid()})" in capsys.readouterr().err


def test_a_start_that_never_ends_is_named_after_a_while(tmp_path: Path) -> None:
    code = f"import time; from pathlib import Path; from common.snakemake_lock import *; begin(Path({str(tmp_path)!r}))"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(InputError, match="another Snakemake has been starting here for 0 s"):
            snakemake_lock.begin(tmp_path, wait=0)
    finally:
        other.kill()
        other.communicate()
