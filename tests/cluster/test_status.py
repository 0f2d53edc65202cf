import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.jobs import Job, State, write_job
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import claim, slurm_job
from tests.conftest import Command
from tests.helpers import assert_one_line_error

HEAD = "iteration,lm_loss,tokens_per_second,ms_per_iteration,mfu\n"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Four model folders below results/, of which the first trains."""
    made = [tmp_path / "results" / "x" / "models" / name for name in ("a", "b", "c", "d")]
    for folder in made:
        folder.mkdir(parents=True)
    (made[0] / "train.csv").write_text(f"{HEAD}10,9.5,1000.5,500,\n20,7.5,2000.4,250,0.4123\n")
    (made[0] / "valid.csv").write_text("iteration,loss\n20,7.75\n")
    (made[0] / "settings.yaml").write_text(yaml.safe_dump({"models": {"a": {"train": {"iterations": 14420}}}}))
    return made


def rows(command: Command, cwd: Path, *options: object) -> list[dict[str, Any]]:
    result = command("cluster.status", "--json", *options, cwd=cwd)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_a_line_shows_how_far_a_training_is_and_how_long_it_takes(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    slurm_job(folders[0], fake, nodes="node[1-2]")
    claim(folders[0], "slurm-1000.0-3")
    result = command("cluster.status", folders[0].relative_to(tmp_path), cwd=tmp_path)
    head, line = result.stdout.splitlines()
    expected = "results/x/models/a running 1000 node[1-2] 20/14420 7.5000 7.7500 2000 1:00:00 3"
    assert line.split() == expected.split()
    assert [name in head for name in ("iteration", "loss", "valid loss", "tokens/s", "ETA", "restarts")] == [True] * 6


def test_the_heartbeat_shows_the_steps_since_the_last_row_of_the_curve(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    for folder, time, done in ((folders[0], 2.0, 137), (folders[0], 1.0, 999), (folders[1], 2.0, 1)):
        beat = folder / "heartbeat" / f"job-{time}" / "rank_00000.json"
        beat.parent.mkdir(parents=True)
        beat.write_text(json.dumps({"time": time, "done": done, "loss": 6.25, "seconds_left": 90}))
    (folders[2] / "iter_0000040").mkdir()
    (folders[2] / "iter_0000040" / "manifest.json").touch()
    slurm_job(folders[0], fake)
    first, second, third = rows(command, tmp_path, *folders[:3])
    assert third["iteration"] == 40  # stopped between two rows
    assert [first[key] for key in ("iteration", "loss", "seconds_left")] == [137, 6.25, 90]
    assert [second[key] for key in ("iteration", "loss", "seconds_left")] == [1, 6.25, None]


def test_all_jobs_are_shown_with_their_reasons_after_one_call_of_squeue(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    slurm_job(folders[0], fake)
    slurm_job(folders[1], fake, "PENDING", reason="Resources")
    slurm_job(folders[2], fake, "FAILED", State("1002", "out of restarts", "time limit", restarts=4))
    (folders[3] / "done.json").write_text('{"iteration": 20}')
    found = rows(command, tmp_path)
    assert [(row["state"], row["reason"]) for row in found] == [
        ("running", ""),
        ("queued", "Resources"),
        ("out of restarts", "time limit"),
        ("finished", ""),
    ]
    assert len(fake.calls()) == 1
    assert found[0]["seconds_left"] == 3600 and found[0]["mfu"] == 0.4123 and found[1]["seconds_left"] is None
    assert found[3]["iteration"] == 20 and found[2]["restarts"] == 4
    table = command("cluster.status", cwd=tmp_path).stdout
    assert "queued (Resources)" in table and "out of restarts (time limit)" in table


def test_a_long_reason_is_cut_in_the_table_only(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    reason = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    slurm_job(folders[0], fake, "PENDING", reason=reason)
    line = command("cluster.status", folders[0]).stdout.splitlines()[1]
    assert "queued (Nodes required for job are DOWN, DRAINED or reserved for …)" in line
    (row,) = rows(command, tmp_path, folders[0])
    assert row["reason"] == reason


def test_a_silent_controller_is_noted_once_and_files_are_shown(
    folders: list[Path], tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    for folder in folders[:3]:
        slurm_job(folder, fake)
    claim(folders[0], "slurm-1000.0-0")
    fake.behave(silent=True)
    result = command("cluster.status", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stderr == "note: the Slurm controller does not answer; states are those of the files\n"
    assert "running" in result.stdout.splitlines()[1] and "does not answer" not in result.stdout


def test_off_the_cluster_the_files_are_shown(
    folders: list[Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(folders[0], Job("1000", "slurm", str(folders[0] / "logs")))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = command("cluster.status", folders[0])
    assert result.returncode == 0 and "20/14420" in result.stdout
    assert "squeue: no such command" in result.stderr and "states are those of the files" in result.stderr


def test_the_total_is_that_of_the_submitted_snapshot(folders: list[Path], tmp_path: Path, command: Command) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "settings.yaml").write_text(yaml.safe_dump({"models": {"a": {"train": {"iterations": 99}}}}))
    write_job(folders[0], Job("999999999", "local", "LOGS", snapshot=str(snapshot)))
    (row,) = rows(command, tmp_path, folders[0])
    assert (row["iteration"], row["iterations"]) == (20, 99)
    assert row["state"] == "failed", "the controller is gone, and there is no done.json"


def test_figures_that_are_missing_or_not_finite_are_left_out(
    folders: list[Path], tmp_path: Path, command: Command
) -> None:
    (folders[1] / "train.csv").write_text(f"{HEAD}10,nan,,inf,\n")
    (row,) = rows(command, tmp_path, folders[1])
    assert (row["iteration"], row["iterations"], row["loss"], row["tokens_per_second"]) == (10, None, None, None)
    assert command("cluster.status", folders[1]).stdout.splitlines()[1].split()[4:6] == ["-", "10/?"]


def test_a_folder_that_does_not_exist_is_one_line(tmp_path: Path, command: Command) -> None:
    assert_one_line_error(command("cluster.status", tmp_path / "none"), "none: no such model folder")
    assert_one_line_error(command("cluster.status", cwd=tmp_path), "no model folder yet", "cluster.submit")
