import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import job_log
from common.config import JOB_SETTINGS

COMMAND = """
import sys
from common import cli
def main():
    {}
sys.exit(cli.run(main))
"""


def run(body: str, out: Path, err: Path | None = None, job: bool = True) -> int:
    """The exit code of a command, of a job or not, whose output goes to files; `err` None: to the same one."""
    with out.open("w") as stdout, (err or out).open("w") as stderr:
        streams = (stdout, stderr) if err else (stdout, subprocess.STDOUT)
        environment = {**os.environ, JOB_SETTINGS: "settings.yaml"} if job else None
        command = [sys.executable, "-c", COMMAND.format(body)]
        return subprocess.run(command, stdout=streams[0], stderr=streams[1], env=environment, check=False).returncode


def test_a_log_ends_with_the_time_and_the_memory_of_its_command(tmp_path: Path) -> None:
    began = time.time()
    assert run("data = b'x' * 200_000_000; print('kept 3'); return 0", tmp_path / "log") == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "kept 3" and len(lines) == 2
    found = job_log.read(tmp_path / "log")
    assert found is not None and 200 < found.memory_mb < 2000
    assert 0 < found.seconds <= time.time() - began + 0.1 and began <= found.ended <= time.time()


def test_the_memory_is_that_of_the_largest_process(tmp_path: Path) -> None:
    child = "import subprocess; subprocess.run([sys.executable, '-c', 'bytearray(range(200)) * 1_000_000'])"
    assert run(f"{child}; return 0", tmp_path / "log") == 0
    found = job_log.read(tmp_path / "log")
    assert found is not None and found.memory_mb > 200


@pytest.mark.parametrize("body", ["return 2", "raise ValueError"])
def test_a_command_that_fails_writes_no_time(tmp_path: Path, body: str) -> None:
    assert run(body, tmp_path / "log") != 0
    assert job_log.read(tmp_path / "log") is None and "finished" not in (tmp_path / "log").read_text()


def test_output_that_is_no_log_stays_as_it_is(tmp_path: Path) -> None:
    assert run("print('x'); return 0", tmp_path / "out", tmp_path / "err") == 0
    assert (tmp_path / "out").read_text() == "x\n" and (tmp_path / "err").read_text() == ""
    assert run("print('x'); return 0", tmp_path / "both", job=False) == 0  # typed by a person
    assert (tmp_path / "both").read_text() == "x\n"


def test_a_log_that_is_not_finished_has_no_time(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("finished after 3.0 s; largest process 5 MB\nstill at work\n")
    assert job_log.read(tmp_path / "log") is None
