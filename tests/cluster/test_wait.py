from pathlib import Path

import pytest

from cluster.jobs import Job, State, progress, write_state
from cluster.submit import wait
from common.errors import JobError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import at_each_squeue, finish, slurm_job, state_of
from training.monitoring.heartbeat import Heartbeat


def test_waiting_ends_with_the_job_over_its_restarts_and_silences_of_the_controller(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.progress.LOG_INTERVAL", 0)
    job = slurm_job(folder, fake, "PENDING", reason="Resources")

    def requeue() -> None:
        write_state(folder, State(job.id, "requeued", "time limit", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)

    steps = (
        bool,
        lambda: fake.change(job.id, state="RUNNING"),
        requeue,
        lambda: at_each_squeue(
            fake, bool, lambda: at_each_squeue(fake, lambda: finish(folder, fake, job)), silent=True
        ),
    )
    at_each_squeue(fake, *steps)
    wait("tiny", folder, job, max_restarts=3)
    output, errors = capsys.readouterr()
    _, running, requeued, silent, *_, done = output.splitlines()
    assert "running" in running and "requeued" in requeued and "restarts: 1" in requeued and "done.json" in done
    assert "requeued" in silent and "does not answer" in silent
    assert errors.count("does not answer; still waiting") == 1


def test_a_line_names_what_a_start_does_until_its_first_iteration_has_ended(folder: Path) -> None:
    job, log = Job("7", "local", str(folder)), folder / "7_0_log.out"

    def shown() -> str:
        return progress(folder, job, State("7", "running"))

    assert shown() == "tiny: job 7 running"
    log.write_text("submitit INFO\nstarting: opens the data\nmodel  tiny: 2 layers\nwarning: x\n")
    assert shown() == "tiny: opens the data; job 7 running"
    assert progress(folder, job, State("7", "requeued")) == "tiny: job 7 requeued"
    with log.open("a") as file:
        file.write("starting: iteration 1\n")
    assert shown() == "tiny: iteration 1; job 7 running"
    with Heartbeat(folder, 0, 0, "7") as heartbeat:  # what it reports first is in its file at once
        heartbeat.report({"done": 1})
        assert shown() == "tiny: iteration 1/?; job 7 running", "no targets, and no pace yet"
    with log.open("a") as file:
        file.write("iteration        1/       9 | consumed samples: 8\n")
    assert shown() == "tiny: job 7 running"


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


def test_a_refused_local_training_has_its_error_as_its_state(folder: Path) -> None:
    job = Job("999999999", "local", str(folder))
    (folder / "999999999_0_log.out").write_text("submitit INFO\nerror: models.tiny needs more\n")
    with pytest.raises(JobError, match=r"^tiny: job 999999999 failed: models.tiny needs more; log: \S+$"):
        wait("tiny", folder, job, 3)
    assert state_of(folder, job).reason == "models.tiny needs more"


def test_a_reason_that_cannot_pass_ends_the_wait_at_once(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "PENDING", reason="PartitionTimeLimit")
    with pytest.raises(JobError, match=r"PartitionTimeLimit.*time_limit_minutes"):
        wait("tiny", folder, job, 3)
    assert state_of(folder, job).state == "failed" and fake.job(job.id).state == "CANCELLED"


def test_a_job_whose_script_was_killed_at_the_time_limit_goes_on(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "TIMEOUT")

    def look() -> None:
        if fake.job(job.id).restarts:
            finish(folder, fake, job)

    at_each_squeue(fake, *[look] * 1000)
    wait("tiny", folder, job, 3)
    assert fake.job(job.id).restarts == 1


def test_the_record_of_an_end_may_appear_after_the_job_has_left_slurm(
    folder: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.jobs._LAG", 60)
    job = slurm_job(folder, fake)
    steps = (lambda: fake.change(job.id, state="COMPLETED"), bool, bool, lambda: finish(folder, fake, job))
    at_each_squeue(fake, *steps)
    wait("tiny", folder, job, 3)
