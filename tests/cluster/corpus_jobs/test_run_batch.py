"""The runner of a task, started as Slurm starts it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.corpus_jobs import run_batch
from cluster.corpus_jobs.run_batch import forget_logs, keep_log, read_events
from tests.training.helpers import wait_for


def write_task(folder: Path, *commands: str, threads: int = 1, logs: tuple[str, ...] = ()) -> None:
    shards = [
        {"label": f"{number:04d}", "command": command, "shell": "/bin/bash", "threads": threads, "logs": logs}
        for number, command in enumerate(commands)
    ]
    (folder / "0.json").write_text(json.dumps({"name": "x.clean.0000-0002", "shards": shards}))
    (folder / "0.results").touch()


def start(folder: Path, job: str = "7", restarts: int = 0, **more: str) -> "subprocess.Popen[str]":
    slurm = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts)}
    command = [sys.executable, "-IS", run_batch.__file__, str(folder)]
    environment = {**os.environ, **slurm, **more}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, job: str = "7", restarts: int = 0, **more: str) -> int:
    process = start(folder, job, restarts, **more)
    output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output, output
    return process.returncode


def exits(folder: Path) -> dict[int, int]:
    events = read_events(str(folder / "0.results"))[0]
    return {event["end"]: event["exit"] for event in events if "end" in event}


def test_a_failed_shard_does_not_stop_the_others(tmp_path: Path) -> None:
    write_task(tmp_path, "true", "exit 3", "true", "kill -9 $$")
    assert run(tmp_path) == 1 and exits(tmp_path) == {0: 0, 1: 3, 2: 0, 3: -9}


def test_a_requeued_task_skips_what_has_ended(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_task(tmp_path, f"echo 0 >> {runs}", f"echo 1 >> {runs}; exit 1", f"echo 2 >> {runs}")
    assert run(tmp_path) == 1
    lines = (tmp_path / "0.results").read_bytes().splitlines(keepends=True)
    (tmp_path / "0.results").write_bytes(b"".join(lines[:-2]) + b'{"start": 2, "ti')  # killed while it wrote
    assert run(tmp_path, restarts=1) == 1
    assert runs.read_text().split() == ["0", "1", "2", "2"] and exits(tmp_path) == {0: 0, 1: 1, 2: 0}


def test_results_are_on_disk_before_the_next_shard_starts(tmp_path: Path) -> None:
    write_task(tmp_path, "true", f"cp {tmp_path}/0.results {tmp_path}/seen")
    assert run(tmp_path) == 0
    events = read_events(str(tmp_path / "seen"))[0]
    assert [next(iter(event)) for event in events] == ["begin", "start", "end", "start"]
    assert events[2]["exit"] == 0 and events[2]["max_rss_mb"] >= 1 and "seconds" in events[2]


def test_an_event_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    run_batch.Task(str(tmp_path), 0, "7", 0).record(start=1)
    assert synced == [(tmp_path / "0.results").stat().st_size] and synced[0] > 0


@pytest.mark.parametrize(("ends", "recorded"), [("kill %1; exit 143", {0: 0}), ("kill %1; exit 0", {0: 0, 1: 0})])
def test_sigterm_reaches_the_command_which_is_recorded_only_if_it_finishes(
    tmp_path: Path, ends: str, recorded: dict[int, int]
) -> None:
    child = f"{sys.executable} -c 'import time; time.sleep(60)'"
    write_task(tmp_path, "true", f"trap '{ends}' TERM; {child} & touch {tmp_path}/started; wait", "true")
    process = start(tmp_path)
    wait_for((tmp_path / "started").exists, timeout=30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143 and exits(tmp_path) == recorded


@pytest.mark.parametrize("marker", ["abandoned", "0.abandoned", "another job"])
def test_a_task_that_was_given_up_or_is_another_jobs_runs_nothing(tmp_path: Path, marker: str) -> None:
    write_task(tmp_path, f"touch {tmp_path}/ran")
    if marker == "another job":
        (tmp_path / "0.results").write_text('{"begin": 0, "job": "6"}\n')
    else:
        (tmp_path / marker).touch()
    assert run(tmp_path, job="7") == 0 and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_older_copy_of_a_requeued_task_leaves_and_its_command_ends(tmp_path: Path) -> None:
    """A node that lost contact runs on while Slurm starts the task elsewhere."""
    write_task(tmp_path, f"echo $$ >> {tmp_path}/pids; sleep 60", "true")
    older = start(tmp_path)
    wait_for((tmp_path / "pids").exists, timeout=30)
    newer = start(tmp_path, restarts=1)
    older.communicate(timeout=30)
    assert older.returncode == 143 and not Path(f"/proc/{int((tmp_path / 'pids').read_text())}").exists()
    newer.terminate()
    newer.communicate(timeout=40)
    assert exits(tmp_path) == {}


def test_only_the_newest_start_of_a_task_goes_on(tmp_path: Path) -> None:
    (tmp_path / "0.results").write_text(
        '{"begin": 0, "job": "7"}\n{"begin": 2, "job": "7"}\n{"begin": 9, "job": "8"}\n'
    )
    wanted = [run_batch.Task(str(tmp_path), 0, job, n).wanted() for job, n in (("7", 1), ("7", 2), ("7", 3), ("8", 9))]
    assert wanted == [False, True, True, False]


def test_a_command_gets_its_threads_its_temporary_folder_and_any_length(tmp_path: Path) -> None:
    command = f"echo $OMP_NUM_THREADS $MKL_NUM_THREADS $TMPDIR {'a' * 200_000} > {tmp_path}/seen"
    write_task(tmp_path, command, threads=3)
    (tmp_path / "scratch").mkdir()
    assert run(tmp_path, TMPDIR=f"{tmp_path}/scratch", OMP_NUM_THREADS="64") == 0
    assert (tmp_path / "seen").read_text().split()[:3] == ["3", "3", f"{tmp_path}/scratch"]


def test_the_log_of_an_interrupted_attempt_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "0003.log"
    log.write_text("first")
    write_task(tmp_path, f"echo second > {log}", logs=(str(log),))
    assert run(tmp_path) == 0
    assert (tmp_path / "0003.attempt1.log").read_text() == "first"
    keep_log(str(log))
    assert (tmp_path / "0003.attempt2.log").read_text() == "second\n"
    forget_logs(str(log))
    assert not list(tmp_path.glob("*.attempt*"))
