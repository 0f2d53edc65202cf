import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.jobs import Job, State, log_path, write_state
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import model_folder, slurm_job
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def write_log(job: Job, text: str, rank: int = 0, number: str = "", age: float = 0) -> Path:
    path = log_path(Job(number or job.id, "slurm", job.logs), rank)
    path.write_text(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def following(folder: Path, *options: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "cluster.logs", str(folder), "--follow", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def test_the_log_of_the_newest_job_is_printed_by_rank(folder: Path, fake: FakeSlurm, command: Command) -> None:
    job = slurm_job(folder, fake)
    write_log(job, "old\n", number="999", age=100)
    write_log(job, "one\ntwo\nthree\n")
    write_log(job, "rank 1\n", rank=1)
    assert command("cluster.logs", folder).stdout == "one\ntwo\nthree\n"
    assert command("cluster.logs", folder, "--lines", "2").stdout == "two\nthree\n"
    assert command("cluster.logs", folder, "--rank", "1").stdout == "rank 1\n"


def test_logs_of_earlier_jobs_come_first_each_below_its_name(folder: Path, fake: FakeSlurm, command: Command) -> None:
    job = slurm_job(folder, fake)
    paths = [
        write_log(job, "oldest\n", number="9", age=200),
        write_log(job, "old\n", number="10", age=100),
        write_log(job, "new\n"),
    ]
    write_log(job, "another rank\n", rank=10, number="9")
    expected = [line for path, text in zip(paths, ("oldest", "old", "new"), strict=True) for line in (path, text)]
    printed = command("cluster.logs", folder, "--all").stdout.splitlines()
    assert printed == [f"==> {line} <==" if isinstance(line, Path) else line for line in expected]
    assert command("cluster.logs", folder, "--all", "--lines", "3").stdout.splitlines() == ["old", *printed[-2:]]


def test_a_missing_log_says_how_the_job_stands(folder: Path, fake: FakeSlurm, command: Command) -> None:
    assert_one_line_error(command("cluster.logs", folder), "no job was submitted", "cluster.submit")
    job = slurm_job(folder, fake, "PENDING", reason="Resources")
    assert_one_line_error(command("cluster.logs", folder), "no log yet, job 1000 is queued: Resources")
    fake.change(job.id, state="RUNNING")
    write_log(job, "x\n")
    write_log(job, "x\n", rank=3)
    assert_one_line_error(command("cluster.logs", folder, "--rank", "7"), "job 1000 is running", "0 to 3")


def test_following_begins_with_the_queue_and_ends_with_the_job(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "PENDING", reason="Resources")
    process = following(folder)
    assert process.stderr is not None and process.stdout is not None
    assert process.stderr.readline() == "note: tiny: job 1000 queued: Resources\n"
    fake.change(job.id, state="RUNNING")
    path = write_log(job, "one\n")
    assert process.stdout.readline() == "one\n"
    with path.open("a") as log:
        log.write("two\n")
    assert process.stdout.readline() == "two\n"
    with path.open("a") as log:
        log.write("last\n")
    write_state(folder, State(job.id, "finished"))
    fake.change(job.id, state="COMPLETED")
    out, errors = process.communicate(timeout=30)
    assert out == "last\n" and errors.endswith("note: tiny: job 1000 finished\n") and process.returncode == 0


def test_following_shows_the_last_lines_first_and_ctrl_c_is_quiet(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    write_log(job, "one\ntwo\nthree\n")
    process = following(folder, "--lines", "1")
    assert process.stdout is not None and process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert (out, errors, process.returncode) == ("", "", 130)


def test_a_reader_that_goes_away_is_no_error(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    write_log(job, "line\n" * 100_000)
    line = f"{sys.executable} -m cluster.logs {folder} | head -n 1"
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "line\n" and result.stderr == ""
