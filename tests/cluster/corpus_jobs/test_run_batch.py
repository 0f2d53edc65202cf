"""The runner of a task, started as Slurm starts it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cluster.corpus_jobs import run_batch
from cluster.corpus_jobs.batches import Request, Task
from cluster.corpus_jobs.run_batch import read_events
from tests.helpers import PATIENCE, wait_for


def write_task(folder: Path, *commands: str) -> None:
    every = {"shell": "/bin/bash", "threads": 1, "logs": []}
    shards = [{"label": f"{number:04d}", "command": command, **every} for number, command in enumerate(commands)]
    (folder / "0.json").write_text(json.dumps(shards))
    (folder / "0.results").touch()


def start(folder: Path, restarts: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-IS", run_batch.__file__, str(folder)]
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, restarts: int = 0) -> int:
    process = start(folder, restarts)
    output, _ = process.communicate()
    assert "Traceback" not in output, output
    return process.returncode


def exits(folder: Path) -> dict[int, int]:
    events = read_events(str(folder / "0.results"))[0]
    return {event["end"]: event["exit"] for event in events if "end" in event}


def test_a_requeued_task_skips_what_has_ended(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_task(tmp_path, f"echo 0 >> {runs}", f"echo 1 >> {runs}; exit 1", f"echo 2 >> {runs}")
    assert run(tmp_path) == 1
    lines = (tmp_path / "0.results").read_bytes().splitlines(keepends=True)
    (tmp_path / "0.results").write_bytes(b"".join(lines[:-2]) + b'{"start": 2, "ti')  # killed while it wrote
    assert run(tmp_path, restarts=1) == 1
    assert runs.read_text().split() == ["0", "1", "2", "2"] and exits(tmp_path) == {0: 0, 1: 1, 2: 0}


def test_a_command_gets_the_python_of_the_run_whatever_setup_has_put_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_task(tmp_path, f"command -v python > {tmp_path}/found")
    assert run(tmp_path) == 0
    assert (tmp_path / "found").read_text() == f"{Path(sys.executable).parent}/python\n"


def test_results_are_on_disk_before_the_next_shard_starts(tmp_path: Path) -> None:
    write_task(tmp_path, "true", f"cp {tmp_path}/0.results {tmp_path}/seen")
    assert run(tmp_path) == 0
    events = read_events(str(tmp_path / "seen"))[0]
    assert [next(iter(event)) for event in events] == ["begin", "start", "end", "start"]
    assert events[2]["exit"] == 0 and events[2]["max_rss_mb"] >= 1 and "seconds" in events[2]


def test_an_event_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    run_batch.Runner(str(tmp_path), 0, "7", 0).record(start=1)
    assert synced == [(tmp_path / "0.results").stat().st_size] and synced[0] > 0


@pytest.mark.parametrize(("ends", "recorded"), [("kill %1; exit 143", {0: 0}), ("kill %1; exit 0", {0: 0, 1: 0})])
def test_sigterm_reaches_the_command_which_is_recorded_only_if_it_finishes(
    tmp_path: Path, ends: str, recorded: dict[int, int]
) -> None:
    child = f"{sys.executable} -c 'import time; time.sleep(60)'"
    write_task(tmp_path, "true", f"trap '{ends}' TERM; {child} & touch {tmp_path}/started; wait", "true")
    process = start(tmp_path)
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143 and exits(tmp_path) == recorded


@pytest.mark.parametrize("ending", ["true", "trap 'exit 143' TERM"])
def test_a_sigterm_that_reaches_the_command_first_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Slurm signals all processes of a job, in any order."""
    monkeypatch.setattr(run_batch, "GRACE", PATIENCE)
    write_task(tmp_path, f"{ending}; echo $$ > {tmp_path}/shell; mv {tmp_path}/shell {tmp_path}/pid; sleep 60 & wait")
    runner = run_batch.Runner(str(tmp_path), 0, "7", 0)
    running = threading.Thread(target=runner.run)
    running.start()
    wait_for((tmp_path / "pid").exists)
    shell = int((tmp_path / "pid").read_text())
    os.kill(shell, signal.SIGTERM)
    wait_for(lambda: not psutil.pid_exists(shell))
    runner.stop()
    running.join()
    events = read_events(str(tmp_path / "0.results"))[0]
    assert [next(iter(event)) for event in events] == ["begin", "start", "left"]


def test_a_node_that_can_start_no_command_is_not_the_shards_fault(tmp_path: Path) -> None:
    """No process left (ulimit -u) is another error of the same call."""
    write_task(tmp_path, "true")
    (tmp_path / "0.json").write_text((tmp_path / "0.json").read_text().replace("/bin/bash", "/no/bash"))
    process = start(tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 1 and output.splitlines()[-1].endswith("No such file or directory: '/no/bash'")
    task = Task(tmp_path, 0, [], Request(1, 1, 1))
    task.read()
    assert "Traceback" not in output and not task.started and task.running is None


def test_a_log_that_takes_nothing_more_changes_no_result(tmp_path: Path) -> None:
    write_task(tmp_path, "true", "true")
    command = [sys.executable, "-IS", run_batch.__file__, str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, check=False)
    assert exits(tmp_path) == {0: 0, 1: 0} and done.returncode == 0


@pytest.mark.parametrize("marker", ["0.abandoned", "another job"])
def test_a_task_that_was_given_up_or_is_another_jobs_runs_nothing(tmp_path: Path, marker: str) -> None:
    write_task(tmp_path, f"touch {tmp_path}/ran")
    if marker == "another job":
        (tmp_path / "0.results").write_text('{"begin": 0, "job": "6"}\n')
    else:
        (tmp_path / marker).touch()
    assert run(tmp_path) == 0 and not (tmp_path / "ran").exists()


def test_only_the_newest_start_of_a_task_goes_on(tmp_path: Path) -> None:
    (tmp_path / "0.results").write_text(
        '{"begin": 0, "job": "7"}\n{"begin": 2, "job": "7"}\n{"begin": 9, "job": "8"}\n'
    )
    wanted = [
        run_batch.Runner(str(tmp_path), 0, job, n).wanted() for job, n in (("7", 1), ("7", 2), ("7", 3), ("8", 9))
    ]
    assert wanted == [False, True, True, False]
