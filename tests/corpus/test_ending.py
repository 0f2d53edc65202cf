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
from tests.helpers import document, prose

LINES = b"".join(orjson.dumps(document(n, prose(n, 400))) + b"\n" for n in range(900))  # two blocks of a megabyte
STEPS = {
    "corpus.clean": ["--input", "-", "--output", "out.zst", "--rejects", "rejects.zst"],
    "corpus.blacklist": ["--input", "-", "--output", "out.txt"],
}


@contextmanager
def waiting(module: str, folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", list[psutil.Process]]]:
    """A step in a new session that waits for more input, and its two workers."""
    command = [sys.executable, "-m", module, *STEPS[module], "--workers", "2"]
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, **pipe, cwd=folder, env=environment, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(LINES if module == "corpus.clean" else b"http://site.example/a-page-of-a-length\n" * 60_000)
        process.stdin.flush()
        found: list[psutil.Process] = []
        while len(found) < 2:  # the step has started, and waits for the rest of its input
            assert process.poll() is None, process.stderr and process.stderr.read()
            found = psutil.Process(process.pid).children(recursive=True)
        try:
            yield process, found
        finally:
            process.kill()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run after 20 seconds."""
    _, left = psutil.wait_procs(processes, timeout=20)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("module", "number", "group"),
    [
        ("corpus.clean", signal.SIGTERM, True),  # Slurm, a terminal: to every process of the job
        ("corpus.clean", signal.SIGHUP, False),
        ("corpus.blacklist", signal.SIGINT, True),
    ],
)
def test_a_step_that_is_told_to_end_leaves_no_process_and_no_file(
    tmp_path: Path, module: str, number: signal.Signals, group: bool
) -> None:
    with waiting(module, tmp_path) as (process, workers):
        (os.killpg if group else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert not alive(workers)
    assert process.returncode == 128 + number and len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_workers_of_a_step_that_is_killed_end_with_it(tmp_path: Path) -> None:
    with waiting("corpus.clean", tmp_path) as (process, workers):
        process.kill()
        assert not alive(workers)
    command = [sys.executable, "-m", "corpus.clean", *STEPS["corpus.clean"]]  # replaces what is left
    subprocess.run(command, input=LINES[: LINES.index(b"\n") + 1], check=True, cwd=tmp_path, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.zst", "rejects.zst"]
