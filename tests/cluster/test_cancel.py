from pathlib import Path

import pytest

from cluster.cancel import cancel, main
from cluster.jobs import Job, State, read_state, write_state
from cluster.submit import submit
from common.errors import JobError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import (
    Call,
    add_checkpoint,
    at_each_look,
    finish,
    make_quick,
    model_folder,
    settings,
    slurm_job,
)
from tests.helpers import assert_one_line_error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_quick(monkeypatch)
    return model_folder(tmp_path)


def state_of(folder: Path, job: Job) -> str:
    state = read_state(folder, job)
    assert state is not None
    return state.state


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_job_in_the_queue_is_removed_from_it(folder: Path, fake: FakeSlurm, restarts: int) -> None:
    recorded = State("1000", "requeued" if restarts else "queued", restarts=restarts)
    job = slurm_job(folder, fake, "PENDING", recorded, reason="Priority")
    assert cancel(folder, job).state == state_of(folder, job) == "cancelled"
    assert fake.job(job.id).state == "CANCELLED" and not (folder / "stop").exists(), "it would stop the next job"


def test_a_running_job_is_asked_and_waited_for(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)

    def leave() -> None:
        write_state(folder, State(job.id, "cancelled", "asked"))
        fake.change(job.id, state="FAILED")

    at_each_look(fake, bool, lambda: (folder / "stop").replace(folder / "stopped"), leave)
    assert cancel(folder, job).reason == "asked" and not fake.calls("scancel") and len(fake.calls("squeue")) == 3


@pytest.mark.parametrize("meanwhile", ["requeued", "finished"])
def test_a_job_that_is_requeued_or_finishes_while_it_is_asked(folder: Path, fake: FakeSlurm, meanwhile: str) -> None:
    job = slurm_job(folder, fake)

    def requeue() -> None:
        write_state(folder, State(job.id, "requeued", "preempted", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)

    at_each_look(fake, bool, requeue if meanwhile == "requeued" else lambda: finish(folder, fake, job))
    expected = {"requeued": ("cancelled", "CANCELLED"), "finished": ("finished", "COMPLETED")}[meanwhile]
    assert (cancel(folder, job).state, fake.job(job.id).state) == expected
    assert state_of(folder, job) == expected[0] and not (folder / "stop").exists()


def test_now_records_the_state_before_slurm_ends_the_job(folder: Path, fake: FakeSlurm) -> None:
    job, recorded = slurm_job(folder, fake), []
    fake.behave(meanwhile=lambda command: recorded.append((command, state_of(folder, job))))
    assert cancel(folder, job, now=True).state == "cancelled"
    assert ("scancel", "cancelled") in recorded and fake.job(job.id).state == "CANCELLED"


def test_without_the_controller_a_running_job_can_be_asked_but_not_killed(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True)
    with pytest.raises(JobError, match="scancel 1000"):
        cancel(folder, job, now=True)
    assert state_of(folder, job) == "queued"
    at_each_look(fake, bool, lambda: (folder / "stop").replace(folder / "stopped"), silent=True)
    assert cancel(folder, job).state == "cancelled"


def test_the_command_says_what_there_was_to_cancel_and_where_the_next_job_starts(
    tmp_path: Path, folder: Path, fake: FakeSlurm, call: Call
) -> None:
    assert call(main, folder).returncode == 0
    job = submit(settings(tmp_path, executor="slurm"), "tiny")
    add_checkpoint(folder, 30)
    result = call(main, folder)
    assert result.returncode == 0 and result.stdout.endswith("iter_0000030\n") and state_of(folder, job) == "cancelled"
    calls = len(fake.calls("scancel"))
    assert call(main, folder).returncode == 0 and len(fake.calls("scancel")) == calls == 1
    assert submit(settings(tmp_path, executor="slurm"), "tiny").id != job.id, "only a person starts it again"
    assert_one_line_error(call(main, folder / "none"), f"{folder}/none")
