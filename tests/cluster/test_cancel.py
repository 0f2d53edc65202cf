import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cancel import cancel
from cluster.jobs import Job, State, read_state, write_state
from cluster.submit import submit
from common.errors import JobError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import add_checkpoint, make_quick, model_folder, settings, slurm_job
from tests.conftest import Command
from tests.helpers import assert_one_line_error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_quick(monkeypatch)
    return model_folder(tmp_path)


def state_of(folder: Path, job: Job) -> str:
    state = read_state(folder, job)
    assert state is not None
    return state.state


def when(condition: Callable[[], object], then: Callable[[], object]) -> None:
    """Do something in a thread as soon as a condition holds."""

    def act() -> None:
        while not condition():
            time.sleep(0.02)
        then()

    threading.Thread(target=act, daemon=True).start()


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_job_in_the_queue_is_removed_from_it(folder: Path, fake: FakeSlurm, restarts: int) -> None:
    recorded = State("1000", "requeued" if restarts else "queued", restarts=restarts)
    job = slurm_job(folder, fake, "PENDING", recorded, reason="Priority")
    assert cancel(folder, job).state == "cancelled"
    assert fake.job(job.id).state == "CANCELLED" and state_of(folder, job) == "cancelled"
    assert not (folder / "stop").exists(), "it would stop the next job"


def test_a_running_job_is_asked_and_waited_for(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm_job(folder, fake)

    def save_and_leave() -> None:
        (folder / "stop").replace(folder / "stopped")
        time.sleep(0.4)
        write_state(folder, State(job.id, "cancelled", "a person asked it to stop"))
        fake.change(job.id, state="FAILED")

    when((folder / "stop").exists, save_and_leave)
    assert cancel(folder, job).state == "cancelled"
    assert "running; waiting until it has finished its step and saved" in capsys.readouterr().out
    assert not fake.calls("scancel")


def test_a_job_that_is_requeued_while_it_is_asked_is_removed_from_the_queue(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)

    def preempt() -> None:
        write_state(folder, State(job.id, "requeued", "preempted", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)

    when((folder / "stop").exists, preempt)
    assert cancel(folder, job).state == "cancelled"
    assert fake.job(job.id).state == "CANCELLED" and not (folder / "stop").exists()


def test_a_job_that_finishes_first_is_finished(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)

    def finish() -> None:
        (folder / "done.json").write_text("{}")
        write_state(folder, State(job.id, "finished"))
        fake.change(job.id, state="COMPLETED")

    when((folder / "stop").exists, finish)
    assert cancel(folder, job).state == "finished"
    assert state_of(folder, job) == "finished" and not (folder / "stop").exists()


def test_now_records_the_state_before_slurm_ends_the_job(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    fake.behave(hangs=0.3)
    recorded_first = []
    when(lambda: fake.calls("scancel"), lambda: recorded_first.append(state_of(folder, job)))
    assert cancel(folder, job, now=True).state == "cancelled"
    assert recorded_first == ["cancelled"] and fake.job(job.id).state == "CANCELLED"
    assert not (folder / "stop").exists()


def test_a_silent_controller_leaves_the_state_as_it_was(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True)
    with pytest.raises(JobError, match=r"scancel 1000: Unable to contact slurm controller|scancel 1000: .*contact"):
        cancel(folder, job, now=True)
    assert state_of(folder, job) == "queued"


def test_a_running_job_stops_without_the_controller(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True)
    when((folder / "stop").exists, lambda: (folder / "stop").replace(folder / "stopped"))
    assert cancel(folder, job).state == "cancelled"


def test_nothing_alive_is_one_line_and_no_error(folder: Path, fake: FakeSlurm, command: Command) -> None:
    result = command("cluster.cancel", folder)
    assert result.returncode == 0 and result.stdout == "tiny: no job was submitted for it\n"
    job = slurm_job(folder, fake, "FAILED", State("1000", "failed", "an error that must be cured first"))
    result = command("cluster.cancel", folder)
    assert result.returncode == 0 and state_of(folder, job) == "failed"
    expected = "tiny: nothing to cancel, job 1000 is not alive: failed: an error that must be cured first\n"
    assert result.stdout == expected
    assert_one_line_error(command("cluster.cancel", folder / "none"), "none: no such model folder")


def test_the_command_says_where_the_next_job_starts(folder: Path, fake: FakeSlurm, command: Command) -> None:
    slurm_job(folder, fake, "PENDING", reason="Priority")
    add_checkpoint(folder, 30)
    result = command("cluster.cancel", folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "tiny: job 1000 queued: Priority; removing it from the queue",
        "tiny: job 1000 cancelled: a person asked it to stop; its newest checkpoint is iter_0000030",
    ]


def test_a_cancelled_job_is_started_again_only_by_a_submission(tmp_path: Path, folder: Path, fake: FakeSlurm) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    cancel(folder, job)
    again = submit(ours, "tiny")
    assert again.id != job.id and state_of(folder, again) == "queued"
