from pathlib import Path

from cluster.cancel import cancel, main
from cluster.jobs import State, write_state
from cluster.submit import submit
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import add_checkpoint, at_each_squeue, settings, slurm_job, state_of
from tests.helpers import assert_one_line_error, called


def test_a_running_job_is_asked_and_waited_for(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)

    def leave() -> None:
        write_state(folder, State(job.id, "cancelled", "asked"))
        fake.change(job.id, state="FAILED")

    at_each_squeue(fake, bool, lambda: (folder / "stop").replace(folder / "stopped"), leave)
    assert cancel(folder, job).reason == "asked" and not fake.calls("scancel") and len(fake.calls("squeue")) == 3


def test_a_job_that_is_requeued_while_it_is_asked_is_cancelled(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)

    def requeue() -> None:
        write_state(folder, State(job.id, "requeued", "preempted", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)

    at_each_squeue(fake, bool, requeue)
    assert cancel(folder, job).state == state_of(folder, job).state == "cancelled"
    assert fake.job(job.id).state == "CANCELLED" and not (folder / "stop").exists()


def test_now_records_the_state_before_slurm_ends_the_job(folder: Path, fake: FakeSlurm) -> None:
    job, recorded = slurm_job(folder, fake), []
    fake.behave(meanwhile=lambda command: recorded.append((command, state_of(folder, job).state)))
    assert cancel(folder, job, now=True).state == "cancelled"
    assert ("scancel", "cancelled") in recorded and fake.job(job.id).state == "CANCELLED"


def test_the_command_says_what_there_was_to_cancel_and_where_the_next_job_starts(
    tmp_path: Path, folder: Path, fake: FakeSlurm
) -> None:
    assert called(main, folder).returncode == 0
    job = submit(settings(tmp_path, executor="slurm"), "tiny")
    add_checkpoint(folder, 30)
    result = called(main, folder)
    assert result.returncode == 0 and result.stdout.endswith("iter_0000030\n")
    assert state_of(folder, job).state == "cancelled"
    calls = len(fake.calls("scancel"))
    assert called(main, folder).returncode == 0 and len(fake.calls("scancel")) == calls == 1
    assert submit(settings(tmp_path, executor="slurm"), "tiny").id != job.id, "only a person starts it again"
    assert_one_line_error(called(main, folder / "none"), f"{folder}/none")
