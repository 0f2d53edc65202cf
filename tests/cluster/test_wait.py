import json
from pathlib import Path

import pytest

from cluster.jobs import State, read_state, write_state
from cluster.wait import wait
from common.errors import JobError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import at_each_look, finish, make_quick, model_folder, slurm_job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_quick(monkeypatch)
    return model_folder(tmp_path)


def test_waiting_ends_with_the_job_over_its_restarts(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.progress.LOG_INTERVAL", 0)
    job = slurm_job(folder, fake, "PENDING", reason="Resources")
    beat = folder / "heartbeat" / "slurm-1000.0-0" / "rank_00000.json"
    beat.parent.mkdir(parents=True)
    beat.write_text(json.dumps({"time": 1.0, "done": 4, "loss": 7.5, "seconds_left": 90}))

    def requeue() -> None:
        write_state(folder, State(job.id, "requeued", "time limit", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)

    at_each_look(fake, bool, lambda: fake.change(job.id, state="RUNNING"), requeue, lambda: finish(folder, fake, job))
    wait("tiny", folder, job, max_restarts=3)
    _, running, requeued, done = capsys.readouterr().out.splitlines()
    assert all(part in running for part in ("running", "iteration 4/?", "7.5000", "0:01:30"))
    assert "requeued" in requeued and "restarts: 1" in requeued and done.endswith(f"{folder}/done.json")


@pytest.mark.parametrize("state", ["failed", "out of restarts", "cancelled"])
def test_a_job_that_does_not_finish_is_an_error_with_the_end_of_its_log(
    folder: Path, fake: FakeSlurm, state: str
) -> None:
    job = slurm_job(folder, fake, "FAILED", State("1000", state, "why", restarts=2))  # type: ignore[arg-type]
    log = Path(job.logs, f"{job.id}_0_log.out")
    log.write_text("error: no such file\n")
    with pytest.raises(JobError) as error:
        wait("tiny", folder, job, 3)
    first, *quoted = str(error.value).splitlines()
    assert first.startswith(f"tiny: job 1000 {state}: why (restarts: 2)")
    if state == "cancelled":
        assert not quoted and "cluster.submit" in first and not fake.calls("sbatch")
    else:
        assert str(log) in first and quoted == ["    error: no such file"]


def test_a_reason_that_cannot_pass_ends_the_wait_at_once(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "PENDING", reason="PartitionTimeLimit")
    with pytest.raises(JobError, match=r"PartitionTimeLimit.*time_limit_minutes"):
        wait("tiny", folder, job, 3)
    recorded = read_state(folder, job)
    assert recorded is not None and recorded.state == "failed" and fake.job(job.id).state == "CANCELLED"


def test_a_controller_that_is_away_is_noted_once_and_ends_nothing(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm_job(folder, fake)

    def back() -> None:
        fake.behave()
        finish(folder, fake, job)

    at_each_look(fake, bool, bool, back, silent=True)
    wait("tiny", folder, job, 3)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_state_that_becomes_visible_late_is_waited_for(
    folder: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.wait._LAG", 20)
    job = slurm_job(folder, fake, "COMPLETED")
    at_each_look(fake, bool, bool, lambda: finish(folder, fake, job))
    wait("tiny", folder, job, 3)


def test_a_job_whose_script_was_killed_at_the_time_limit_goes_on(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "TIMEOUT")

    def look() -> None:
        if fake.job(job.id).restarts:
            finish(folder, fake, job)

    at_each_look(fake, *[look] * 1000)
    wait("tiny", folder, job, 3)
    assert fake.job(job.id).restarts == 1
