"""Jobs on this machine, from `cluster.submit` to their end: processes that train."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import submitit

from cluster import TrainingJob, cancel, executors, logs, status
from common.files import read_json, read_rows
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error, called, wait_for
from tests.training.helpers import make_run, settings_of
from training.model_folder import checkpoint_folders, iteration_of

LONG = 10**6


class Run:
    """A configuration of a long training, and what became of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "models" / "tiny"
        self.config = make_run(folder, parallel={"tensor": 2}, train={"iterations": LONG, "save_interval": LONG})
        self.names = ["--config", str(self.config), "--model", "tiny"]

    def wait(self) -> "subprocess.Popen[str]":
        """`cluster.submit` in the foreground of a terminal of its own, as far as signals go."""
        command = [sys.executable, "-m", "cluster.submit", *self.names, "--wait"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def processes(self) -> list[psutil.Process]:
        """The ranks and the controllers that belong to it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and str(self.folder) in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @property
    def state(self) -> Any:
        return read_json(self.model / "state.json")

    def until_it_trains(self) -> None:
        wait_for(lambda: len(read_rows(self.model / "train.csv")) >= 2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A long training; whatever is left of it is killed after the test."""
    made = Run(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def ctrl_c(process: "subprocess.Popen[str]") -> None:
    """What a terminal does: the signal reaches every process of the group."""
    os.killpg(process.pid, signal.SIGINT)


def test_ctrl_c_while_waiting_saves_and_the_same_command_continues(run: Run) -> None:
    waiting = run.wait()
    run.until_it_trains()
    assert run.state["state"] == "running"
    ctrl_c(waiting)
    waiting.communicate()
    assert waiting.returncode == 130 and not run.processes()
    (saved,) = checkpoint_folders(run.model)
    assert run.state["state"] == "cancelled"
    text = run.config.read_text()
    run.config.write_text(text.replace(f"iterations: {LONG}", f"iterations: {iteration_of(saved) + 2}"))
    again = run.wait()
    _, errors = again.communicate()
    assert again.returncode == 0 and run.state["state"] == "finished", errors
    assert read_json(run.model / "done.json")["iteration"] == iteration_of(saved) + 2
    assert "finished" in called(status.main, run.model).stdout
    assert f"resumed from {saved}" in called(logs.main, run.model, "--lines", "40").stdout
    assert called(logs.main, run.model, "--rank", "1").returncode == 0


def test_an_executor_of_ones_own_runs_the_job_and_raises_for_one_that_failed(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"iterations": 2, "save_interval": 2})
    executor = submitit.LocalExecutor(tmp_path / "logs")
    executor.update_parameters(timeout_min=5)
    jobs = [executor.submit(TrainingJob(str(config), name)) for name in ("tiny", "other")]
    jobs[0].result()
    assert read_json(tmp_path / "models/tiny/done.json")["iteration"] == 2
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="other"):
        jobs[1].result()


def test_cancel_saves_and_a_waiter_ends_with_one_line(run: Run) -> None:
    run.config.write_text(run.config.read_text().replace("tensor: 2", "tensor: 1"))
    waiting = run.wait()
    run.until_it_trains()
    result = called(cancel.main, run.model)
    (saved,) = checkpoint_folders(run.model)
    assert result.returncode == 0 and saved.name in result.stdout.splitlines()[-1]
    _, errors = waiting.communicate()
    waited = subprocess.CompletedProcess(waiting.args, waiting.returncode, "", errors)
    assert_one_line_error(waited, "cancelled", "cluster.submit")
    assert run.state["state"] == "cancelled" and not (run.model / "stop").exists() and not run.processes()


def test_a_local_job_has_the_time_limit_of_its_model_in_minutes(tmp_path: Path) -> None:
    settings = settings_of(make_run(tmp_path, parallel={"tensor": 2}))
    job = TrainingJob(str(tmp_path / "settings.yaml"), "tiny")
    executor = executors.local_executor(settings, job, 90)
    assert (executor.parameters["timeout_min"], executor.parameters["tasks_per_node"]) == (90, 2)
