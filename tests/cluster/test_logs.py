import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.jobs import Job, log_path
from cluster.logs import main
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import Call, at_each_look, finish, make_quick, model_folder, slurm_job
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_quick(monkeypatch)
    return model_folder(tmp_path)


def write_log(job: Job, text: str, rank: int = 0, number: str = "", age: float = 0) -> Path:
    path = log_path(Job(number or job.id, "slurm", job.logs), rank)
    with path.open("a") as log:
        log.write(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_the_log_of_a_rank_is_printed_and_those_of_earlier_jobs_before_it(
    folder: Path, fake: FakeSlurm, call: Call
) -> None:
    job = slurm_job(folder, fake)
    oldest, old = write_log(job, "oldest\n", number="9", age=200), write_log(job, "old\n", number="10", age=100)
    new = write_log(job, "one\ntwo\nthree\n")
    write_log(job, "rank 10\n", rank=10)
    assert call(main, folder).stdout == "one\ntwo\nthree\n"
    assert call(main, folder, "--lines", 2).stdout == "two\nthree\n"
    assert call(main, folder, "--rank", 10).stdout == "rank 10\n"
    everything = f"==> {oldest} <==\noldest\n==> {old} <==\nold\n==> {new} <==\none\ntwo\nthree\n"
    assert call(main, folder, "--all").stdout == everything
    assert call(main, folder, "--all", "--lines", 5).stdout.splitlines() == everything.splitlines()[-5:]


def test_a_missing_log_says_how_the_job_stands(folder: Path, fake: FakeSlurm, call: Call) -> None:
    assert_one_line_error(call(main, folder), str(folder), "cluster.submit")
    job = slurm_job(folder, fake, "PENDING", reason="Resources")
    assert_one_line_error(call(main, folder), "1000_0_log.out", "queued: Resources")
    write_log(job, "x\n", rank=3)
    assert_one_line_error(call(main, folder, "--rank", "7"), "1000_7_log.out", "0 to 3")


def test_following_begins_in_the_queue_and_ends_with_the_job(folder: Path, fake: FakeSlurm, call: Call) -> None:
    job = slurm_job(folder, fake, "PENDING", reason="Resources")

    def run() -> None:
        fake.change(job.id, state="RUNNING")
        write_log(job, "one\n")

    def end() -> None:
        write_log(job, "last\n")
        finish(folder, fake, job)

    at_each_look(fake, bool, run, lambda: write_log(job, "two\n"), end)
    result = call(main, folder, "--follow")
    assert result.returncode == 0 and result.stdout == "one\ntwo\nlast\n"
    first, *_, last = result.stderr.splitlines()
    assert first.endswith("1000 queued: Resources") and last.endswith("1000 finished")


def test_following_shows_the_last_lines_first_and_ctrl_c_is_quiet(folder: Path, fake: FakeSlurm) -> None:
    write_log(slurm_job(folder, fake), "one\ntwo\nthree\n")
    line = [sys.executable, "-m", "cluster.logs", str(folder), "--follow", "--lines", "1"]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=30), process.returncode) == ("", "", 130)


def test_a_reader_that_goes_away_is_no_error(folder: Path, fake: FakeSlurm) -> None:
    write_log(slurm_job(folder, fake), "line\n" * 100_000)
    line = f"{sys.executable} -m cluster.logs {folder} | head -n 1"
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "line\n" and result.stderr == ""
