"""Steps that are terminated or killed while their workers are busy or idle."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from tests.conftest import ROOT
from tests.helpers import document, prose, wait_for
from tests.slurm.lab.processes import alive

LINES = b"".join(orjson.dumps(document(n, prose(n, 400))) + b"\n" for n in range(900))  # two blocks of a megabyte
STEP = [sys.executable, "-m", "corpus.clean", "--input", "-", "--output", "out.zst", "--rejects", "rejects.zst"]


@contextmanager
def waiting(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", list[psutil.Process]]]:
    """A step in a new session that waits for more input, and its two workers."""
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*STEP, "--workers", "2"], **pipe, cwd=folder, env=environment, start_new_session=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(LINES)
        process.stdin.flush()
        found: list[psutil.Process] = []
        while len(found) < 2:  # the step has started, and waits for the rest of its input
            assert process.poll() is None, process.stderr and process.stderr.read()
            found = psutil.Process(process.pid).children(recursive=True)
        try:
            yield process, found
        finally:
            process.kill()


# Slurm and a terminal signal every process of the job.
@pytest.mark.parametrize(("number", "group"), [(signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_step_that_is_told_to_end_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    with waiting(tmp_path) as (process, workers):
        (os.killpg if group else os.kill)(process.pid, number)
        _, errors = process.communicate()
        wait_for(lambda: not any(map(alive, workers)))
    assert process.returncode == 128 + number and len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_workers_of_a_step_that_is_killed_end_with_it(tmp_path: Path) -> None:
    with waiting(tmp_path) as (process, workers):
        process.kill()
        wait_for(lambda: not any(map(alive, workers)))
    line = LINES[: LINES.index(b"\n") + 1]
    subprocess.run(STEP, input=line, check=True, cwd=tmp_path, capture_output=True)  # replaces what is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.zst", "rejects.zst"]
