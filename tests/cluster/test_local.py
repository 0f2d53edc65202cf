"""Jobs on this machine, from `cluster.submit` to their end: two processes that train."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common.files import read_json, read_rows
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error
from tests.training.helpers import make_run, wait_for
from training.model_folder import checkpoint_folders, iteration_of

LONG = 10**6


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A configuration of a long training; whatever is left of it is killed after the test."""
    yield make_run(tmp_path, parallel={"tensor": 2}, train={"iterations": LONG, "save_interval": LONG})
    for process in _processes(tmp_path):
        process.kill()


def _processes(folder: Path) -> list[psutil.Process]:
    """The ranks and the controllers that belong to a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _ranks(folder: Path) -> list[psutil.Process]:
    return [process for process in _processes(folder) if "training.train" in process.cmdline()]


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(folder / "models" / "tiny" / "state.json")
    return state


def _until_it_trains(folder: Path, rows: int = 2) -> None:
    wait_for(lambda: len(read_rows(folder / "models" / "tiny" / "train.csv")) >= rows, timeout=200)


def _wait_in_background(config: Path) -> "subprocess.Popen[str]":
    """`cluster.submit --wait` in the foreground of a terminal of its own, as far as signals go."""
    command = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny", "--wait"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _ctrl_c(process: "subprocess.Popen[str]") -> None:
    """What a terminal does: the signal reaches every process of the group."""
    os.killpg(process.pid, signal.SIGINT)


def _shorten(config: Path, iterations: int) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["models"]["tiny"]["train"]["iterations"] = iterations
    config.write_text(yaml.safe_dump(raw))


def test_a_job_trains_from_its_snapshot_and_finishes(config: Path, command: Command) -> None:
    folder = config.parent / "models" / "tiny"
    _shorten(config, 3)
    result = command("cluster.submit", "--config", config, "--model", "tiny", "--wait")
    assert result.returncode == 0 and "tiny: done" in result.stdout, result.stderr
    assert read_json(folder / "done.json")["iteration"] == 3
    assert _state(config.parent)["state"] == "finished"
    assert "finished" in command("cluster.status", folder).stdout
    assert "iteration        3/       3" in command("cluster.logs", folder, "--lines", "20").stdout
    assert command("cluster.logs", folder, "--rank", "1").returncode == 0
    assert "not alive: finished" in command("cluster.cancel", folder).stdout


@pytest.mark.slow
def test_a_killed_rank_fails_the_job_with_its_log_and_the_next_submission_continues(
    config: Path, command: Command
) -> None:
    folder = config.parent / "models" / "tiny"
    raw = yaml.safe_load(config.read_text())
    raw["models"]["tiny"]["train"]["save_interval"] = 1
    config.write_text(yaml.safe_dump(raw))
    waiting = _wait_in_background(config)
    wait_for(lambda: checkpoint_folders(folder), timeout=200)
    _ranks(config.parent)[-1].kill()
    _, errors = waiting.communicate(timeout=200)
    assert waiting.returncode == 2
    first, *quoted = errors.strip().splitlines()
    assert first.startswith("error: tiny: job ") and "failed" in first and "_0_log.out" in first, errors
    assert any("rank 1" in line or "rank 0" in line for line in quoted), errors
    assert _state(config.parent)["state"] == "failed"
    newest = checkpoint_folders(folder)[0]
    _shorten(config, iteration_of(newest) + 2)
    assert command("cluster.submit", "--config", config, "--model", "tiny", "--wait").returncode == 0
    logs = command("cluster.logs", folder, "--all").stdout
    assert logs.count("==> ") == 2 and f"resumed from {newest}" in logs
    assert "resumed from" in command("cluster.logs", folder).stdout.split("==>")[0]


def test_ctrl_c_while_waiting_saves_and_the_same_command_continues(config: Path, command: Command) -> None:
    folder = config.parent / "models" / "tiny"
    waiting = _wait_in_background(config)
    _until_it_trains(config.parent)
    _ctrl_c(waiting)
    _, errors = waiting.communicate(timeout=200)
    assert waiting.returncode == 130 and "finishing the step, then saving" in errors
    assert not _processes(config.parent)
    (saved,) = checkpoint_folders(folder)
    assert (_state(config.parent)["state"], _state(config.parent)["reason"]) == ("cancelled", "interrupted")
    _shorten(config, iteration_of(saved) + 2)
    result = command("cluster.submit", "--config", config, "--model", "tiny", "--wait")
    assert result.returncode == 0, result.stderr
    assert f"resumed from {saved}" in command("cluster.logs", folder).stdout


@pytest.mark.slow
def test_a_second_ctrl_c_kills_a_job_that_does_not_end(config: Path) -> None:
    waiting = _wait_in_background(config)
    _until_it_trains(config.parent)
    for rank in _ranks(config.parent):
        rank.suspend()  # a step that takes hours
    _ctrl_c(waiting)
    assert waiting.stderr is not None
    while "Ctrl-C again" not in waiting.stderr.readline():
        pass
    _ctrl_c(waiting)
    waiting.communicate(timeout=200)
    assert waiting.returncode == 130 and not _processes(config.parent)
    assert _state(config.parent)["state"] == "cancelled"


@pytest.mark.slow
def test_a_job_without_a_waiter_survives_ctrl_c_and_a_closed_terminal(config: Path, command: Command) -> None:
    submit = subprocess.run(
        [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny"],
        cwd=ROOT,
        start_new_session=True,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert "submitted job" in submit.stdout
    _until_it_trains(config.parent, rows=1)
    controller = int(read_json(config.parent / "models" / "tiny" / "job.json")["id"])
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(os.getpgid(controller), number)
    rows = len(read_rows(config.parent / "models" / "tiny" / "train.csv"))
    _until_it_trains(config.parent, rows=rows + 3)
    again = command("cluster.submit", "--config", config, "--model", "tiny")
    assert "not submitted again" in again.stdout


def test_cancel_saves_and_a_waiter_ends_with_one_line(config: Path, command: Command) -> None:
    folder = config.parent / "models" / "tiny"
    waiting = _wait_in_background(config)
    _until_it_trains(config.parent)
    result = command("cluster.cancel", folder)
    assert result.returncode == 0, result.stderr
    (saved,) = checkpoint_folders(folder)
    asked, ended = result.stdout.splitlines()
    assert asked.endswith("running; waiting until it has finished its step and saved")
    assert ended.endswith(f"cancelled: a person asked it to stop; its newest checkpoint is {saved.name}")
    _, errors = waiting.communicate(timeout=200)
    waited = subprocess.CompletedProcess(waiting.args, waiting.returncode, "", errors)
    assert_one_line_error(waited, "cancelled", "python -m cluster.submit")
    assert _state(config.parent)["state"] == "cancelled"
    assert not (folder / "stop").exists() and not _processes(config.parent)


@pytest.mark.slow
def test_cancel_now_ends_even_a_job_that_hangs(config: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config.parent / "models" / "tiny"
    command("cluster.submit", "--config", config, "--model", "tiny")
    _until_it_trains(config.parent)
    for rank in _ranks(config.parent):
        rank.suspend()
    result = command("cluster.cancel", folder, "--now")
    assert result.returncode == 0 and "it has no checkpoint" in result.stdout, result.stderr
    assert _state(config.parent)["state"] == "cancelled" and not _processes(config.parent)
