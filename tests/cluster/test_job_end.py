from dataclasses import replace
from pathlib import Path

import pytest

from cluster.job_end import LOCK_LOST, Ended, decide, end_job, requeue_dead
from cluster.jobs import ASKED, State
from cluster.submit import submit
from common.errors import RESUME_ME, USER_ERROR
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import add_checkpoint, settings, slurm_job, state_of

BEFORE = State("1000", "queued", checkpoint=10)


def details(state: str = "RUNNING", ran: str = "00:10:00", **more: str) -> dict[str, str]:
    """`scontrol show job` of a job with a limit of an hour."""
    return {"JobState": state, "Restarts": "0", "RunTime": ran, "TimeLimit": "01:00:00", **more}


CASES = {
    "finished": (0, details(), "finished", ""),
    "finished, a silent controller": (0, {}, "finished", ""),
    "an error to cure": (USER_ERROR, details(), "failed", "cured"),
    "scancel": (RESUME_ME, details("COMPLETING"), "cancelled", "scancel"),
    "scancel, a second later": (RESUME_ME, details("CANCELLED"), "cancelled", "scancel"),
    "scancel of a process that died": (143, details("COMPLETING"), "cancelled", "scancel"),
    "preempted": (RESUME_ME, details(PreemptTime="x"), "requeued", "preempted"),
    "preempted, after its grace": (137, details("COMPLETING", PreemptTime="x"), "requeued", "preempted"),
    "told with a quarter of its time left": (RESUME_ME, details(ran="00:45:00"), "requeued", "time limit"),
    "another signal": (RESUME_ME, details(ran="00:35:00"), "requeued", "a signal"),
    "at the limit": (RESUME_ME, details("COMPLETING", "01:00:00"), "requeued", "time limit"),
    "killed at the limit": (137, details("TIMEOUT", "01:00:02"), "requeued", "137"),
    "a dead process": (137, details(), "requeued", "137"),
    "a limit of days": (RESUME_ME, details(TimeLimit="2-00:00:00"), "requeued", "time limit"),
    "no limit": (RESUME_ME, details(TimeLimit="UNLIMITED"), "requeued", "a signal"),
    "a silent controller": (RESUME_ME, {}, "requeued", "a signal"),
}
OUT_OF_MEMORY = (
    "slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may …",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
    "srun: error: node1: task 1: Out Of Memory",
    "slurmstepd-node1: error: StepId=7.0 exceeded memory limit (384110592 > 209715200), being killed",
)


@pytest.mark.parametrize("case", CASES)
def test_the_end_of_a_job_decides_its_state(case: str) -> None:
    code, shown, state, reason = CASES[case]
    after = decide(Ended(code, 0, shown, 20, False), BEFORE, max_restarts=3)
    assert after is not None and (after.state, after.checkpoint) == (state, 20)
    assert reason in after.reason and after.restarts == (1 if state == "requeued" else 0)


def test_a_job_that_is_out_of_memory_fails_and_names_the_key(folder: Path, fake: FakeSlurm) -> None:
    for line in OUT_OF_MEMORY:
        job = slurm_job(folder, fake)
        (folder / "logs" / f"{job.id}_0_log.out").write_text(f"iteration 7\n{line}\n")
        end_job(folder, job, 137, 0, max_restarts=3)
        after = state_of(folder, job)
        assert after.state == "failed" and "raise cluster.mem_gb_per_task" in after.reason, line
        assert fake.job(job.id).restarts == 0


def test_what_a_person_or_slurm_has_decided_already_counts_more() -> None:
    assert decide(Ended(137, 0, details(Restarts="1"), 20, False), BEFORE, 3) is None, "it is requeued already"
    cancelled = replace(BEFORE, state="cancelled", reason=ASKED)
    for code, before, stopped, state in (
        (RESUME_ME, cancelled, False, "cancelled"),
        (0, cancelled, False, "finished"),
        (137, BEFORE, True, "cancelled"),
        (0, BEFORE, True, "finished"),
    ):
        after = decide(Ended(code, 2, details(Restarts="2"), 20, stopped), before, 3)
        assert after is not None and (after.state, after.restarts, after.checkpoint) == (state, 2, 20)
        assert after.reason == (ASKED if state == "cancelled" else "")


def test_restarts_without_a_checkpoint_are_bounded_and_a_checkpoint_starts_again() -> None:
    state, found = BEFORE, []
    for restarts in range(4):
        after = decide(Ended(1, restarts, details(Restarts=str(restarts)), 10, False), state, max_restarts=3)
        assert after is not None
        found.append((after.state, after.restarts_without_progress))
        state = after
    assert found == [("requeued", 1), ("requeued", 2), ("requeued", 3), ("out of restarts", 3)]
    assert "cluster.max_restarts" in state.reason
    progress = replace(state, state="requeued", checkpoint=10, restarts_without_progress=3)
    after = decide(Ended(1, 4, details(Restarts="4"), 11, False), progress, max_restarts=3)
    assert after is not None and (after.state, after.restarts_without_progress, after.restarts) == ("requeued", 0, 5)
    after = decide(Ended(1, 0, details(), 10, False), BEFORE, max_restarts=0)
    assert after is not None and after.state == "out of restarts"


def test_a_job_that_should_go_on_is_requeued_with_its_state_written_first(folder: Path, fake: FakeSlurm) -> None:
    job, seen = slurm_job(folder, fake), []
    add_checkpoint(folder, 30)
    fake.behave(meanwhile=lambda _: seen.append(state_of(folder, job).state))
    assert end_job(folder, job, RESUME_ME, 0, max_restarts=3) == RESUME_ME
    assert state_of(folder, job) == State(
        job.id, "requeued", "time limit, or a signal", 1, 0, 30, state_of(folder, job).time
    )
    assert (fake.job(job.id).state, fake.job(job.id).restarts, seen) == ("PENDING", 1, ["queued", "requeued"])


def test_a_person_who_asked_for_a_stop_gets_it(folder: Path, fake: FakeSlurm) -> None:
    for name in ("stop", "stopped"):
        job = slurm_job(folder, fake)
        (folder / name).touch()
        end_job(folder, job, RESUME_ME, 0, max_restarts=3)
        (folder / name).unlink()
        assert state_of(folder, job).state == "cancelled" and fake.job(job.id).restarts == 0, name


def test_a_start_that_lost_its_folder_changes_nothing(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    before = state_of(folder, job)
    assert end_job(folder, job, LOCK_LOST, 0, 3) == 0
    fake.change(job.id, restarts=1)
    assert end_job(folder, job, 137, 0, 3) == 137
    assert state_of(folder, job) == before and fake.job(job.id).restarts == 1


def test_a_job_waits_for_a_controller_that_is_away_but_not_for_one_that_refuses(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True, meanwhile=lambda _: len(fake.calls("scontrol")) >= 4 and fake.behave())
    end_job(folder, job, 137, 0, 3)
    assert len(fake.calls("scontrol")) >= 5 and fake.job(job.id).restarts == 1
    job = slurm_job(folder, fake, options=["--no-requeue"])
    end_job(folder, job, 137, 0, 3)
    assert state_of(folder, job).state == "failed" and state_of(folder, job).reason.endswith("refused to requeue it")


def test_a_job_whose_batch_script_was_killed_is_requeued_unless_a_person_or_the_script_did_it(
    folder: Path, fake: FakeSlurm
) -> None:
    for state in ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "CANCELLED", "FAILED", "OUT_OF_MEMORY"):
        job, again = slurm_job(folder, fake, state), state in ("TIMEOUT", "PREEMPTED", "NODE_FAIL")
        after = requeue_dead(folder, job, State(job.id, "failed", f"Slurm's state: {state}"), max_restarts=3)
        assert after.state == state_of(folder, job).state == ("requeued" if again else "failed"), state
        assert fake.job(job.id).restarts == again
        assert ("cluster.mem_gb_per_task" in after.reason) == (state == "OUT_OF_MEMORY")


def test_the_batch_script_ends_with_the_code_of_the_ranks_and_records_the_end(tmp_path: Path, fake: FakeSlurm) -> None:
    job = submit(settings(tmp_path, executor="slurm"), "tiny")
    for code, state, restarts in ((75, "requeued", 1), (2, "failed", 1), (0, "finished", 1)):
        fake.change(job.id, state="RUNNING")
        result = fake.run(job.id, exit_code=code)
        assert result.returncode == code and state_of(tmp_path / "models/tiny", job).state == state, result.stderr
        assert fake.job(job.id).restarts == restarts
