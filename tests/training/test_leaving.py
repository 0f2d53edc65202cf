"""A signal that comes while a training starts ends it at once, without a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import RESUME_ME
from tests.conftest import ROOT
from tests.helpers import wait_for
from tests.training.helpers import make_run

LONG = {"iterations": 10**6, "save_interval": 10**6, "eval_interval": 10**6}
ONE_OF_TWO = {"EXECUTOR": "local", "LOCAL_JOB_ID": "1"}
ONE_OF_TWO |= {"LOCAL_NTASKS": "2", "LOCAL_GLOBALID": "0", "LOCAL_LOCALID": "0"}


@contextmanager
def running(*words: object, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """`python WORDS…`, killed at the end."""
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"SUBMITIT_{key}": value for key, value in env.items()}}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=nowhere, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def training(config: Path) -> tuple[object, ...]:
    return ("-m", "training.train", "--config", config, "--model", "tiny")


def test_a_process_that_waits_for_others_in_a_library_leaves_at_once(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2}, train=LONG)
    with running(*training(config), **ONE_OF_TWO) as rank0:
        wait_for((tmp_path / "models/tiny/meeting-local-1").exists)
        time.sleep(0.2)  # rank 0 is in the store's C++ code by now
        rank0.send_signal(signal.SIGTERM)
        _, said = rank0.communicate()  # the other rank never comes
    assert rank0.returncode == RESUME_ME
    assert said.startswith("SIGTERM ") and said.count("\n") == 1


def test_a_time_limit_announced_during_the_start_saves_after_the_first_step(tmp_path: Path) -> None:
    with running(*training(make_run(tmp_path, train=LONG))) as process:
        wait_for((tmp_path / "models/tiny").exists)  # torch is imported after this
        process.send_signal(signal.SIGUSR2)
        _, said = process.communicate()
    assert process.returncode == RESUME_ME, said
    assert [path.name for path in (tmp_path / "models/tiny").glob("iter_*")] == ["iter_0000001"]


def test_a_process_that_is_failing_already_keeps_its_code() -> None:
    code = "import sys; from training.launch.signals import ignore_signals, leave_at_once; "
    code += "leave_at_once(); ignore_signals(); "
    code += "print('failing', file=sys.stderr, flush=True); sys.stdin.read(); sys.exit(2)"
    with running("-c", code) as process:
        assert process.stderr is not None and process.stderr.readline() == "failing\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR2)
        _, said = process.communicate()
    assert process.returncode == 2 and said == ""
