import os
import subprocess
import sys
import time
from pathlib import Path

from common import job_log
from common.config import JOB_SETTINGS

COMMAND = "import subprocess, sys; from common import cli\ndef main():\n    {}\nsys.exit(cli.run(main))"


def run(body: str, log: Path) -> int:
    """The exit code of a job whose output goes to a file."""
    with log.open("w") as output:
        command, environment = [sys.executable, "-c", COMMAND.format(body)], {**os.environ, JOB_SETTINGS: "x.yaml"}
        return subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode


def test_a_log_ends_with_the_time_and_the_memory_of_the_largest_process_of_its_command(tmp_path: Path) -> None:
    began = time.time()
    child = "subprocess.run([sys.executable, '-c', 'bytearray(range(200)) * 1_000_000'])"
    assert run(f"{child}; print('kept 3'); return 0", tmp_path / "log") == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "kept 3" and len(lines) == 2
    found = job_log.read(tmp_path / "log")
    assert found is not None and 200 < found.memory_mb < 2000
    assert 0 < found.seconds <= time.time() - began + 0.1 and began <= found.ended <= time.time()
    (tmp_path / "log").write_text("\n".join([lines[1], "still at work", ""]))
    assert job_log.read(tmp_path / "log") is None
    assert run("return 2", tmp_path / "log") == 2 and (tmp_path / "log").read_text() == "", "it failed"
