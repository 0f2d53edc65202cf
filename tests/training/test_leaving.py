"""A signal that comes while a training starts ends it at once, without a traceback; it is to be started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.helpers import make_run, wait_for
from training.leaving import RESUME_ME

LONG = {"iterations": 10**6, "save_interval": 10**6, "eval_interval": 10**6}


@contextmanager
def running(*words: object, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """`python WORDS…`, killed at the end."""
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def one_of_two(rank: int) -> dict[str, str]:
    """The environment of one task of a local job of two."""
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "1",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }


def test_a_process_that_waits_for_others_in_a_library_leaves_at_once(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2}, train=LONG)
    meeting = tmp_path / "models/tiny/meeting-local-1"
    command = ("-m", "training.train", "--config", config, "--model", "tiny")
    with running(*command, **one_of_two(0)) as rank0:
        wait_for(meeting.exists)
        time.sleep(0.2)  # rank 0 is in the store's C++ code by now
        sent = time.monotonic()
        rank0.send_signal(signal.SIGTERM)
        _, said = rank0.communicate(timeout=20)
    assert rank0.returncode == RESUME_ME
    assert time.monotonic() - sent < 3
    assert said == "SIGTERM before training began: nothing to save; start again to go on\n"


@pytest.mark.parametrize(
    "delays", [[0.6, 2.0], pytest.param([n / 10 for n in range(1, 60)], marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_a_signal_at_any_moment_of_the_start_ends_it_to_be_resumed(tmp_path: Path, delays: list[float]) -> None:
    """SIGTERM at once; SIGUSR2 after a step and a checkpoint."""
    config = make_run(tmp_path, train=LONG)
    for delay in delays:
        number = (signal.SIGTERM, signal.SIGUSR2)[round(10 * delay) % 2]
        with running("-m", "training.train", "--config", config, "--model", "tiny") as process:
            time.sleep(delay)
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        # before our first line Python has no handlers, and the signal is deadly by itself
        assert process.returncode in (RESUME_ME, -number), (delay, said)
        assert "Traceback" not in said and said.count("\n") <= 1, (delay, said)
        if number == signal.SIGUSR2 and process.returncode == RESUME_ME:
            assert list((tmp_path / "models/tiny").glob("iter_*/*")), delay


def test_a_process_that_is_failing_already_keeps_its_code() -> None:
    code = """
import sys, time
from training.leaving import disarm, leave_at_once
leave_at_once()
disarm()
print("failing", file=sys.stderr, flush=True)
time.sleep(1)
sys.exit(2)
"""
    with running("-c", code) as process:
        assert process.stderr is not None and process.stderr.readline() == "failing\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR2)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 2 and said == ""
