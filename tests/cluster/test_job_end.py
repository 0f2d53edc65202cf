import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import slurm
from cluster.job_end import TAKEN_OVER, Ended, decide, end_job, is_taken_over, requeue_dead
from cluster.jobs import Job, State, read_state, write_state
from cluster.submit import submit
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import add_checkpoint, claim, make_quick, model_folder, settings, slurm_job
from tests.conftest import ROOT
from training.leaving import RESUME_ME
from training.model_folder import failed_mark, mark_failed

CANCELLED_REASON = "a person asked it to stop"
BEFORE = State("1000", "queued", checkpoint=10)


def clock(seconds_from_now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds_from_now))


def details(state: str = "RUNNING", started: float = -600, ends: float = 3000, **more: str) -> dict[str, str]:
    """`scontrol show job` of a job that started and will end (or has ended) so many seconds from now; limit 1 hour."""
    times = {"StartTime": clock(started), "EndTime": clock(ends), "TimeLimit": "01:00:00"}
    return {"JobState": state, "Restarts": "0", **times, **more}


AT_LIMIT = {"started": -3600, "ends": 0}
CASES: list[tuple[str, Ended, str, str]] = [
    ("finished", Ended(0, 0, details(), 20, False), "finished", ""),
    ("finished in spite of a stop", Ended(0, 0, details(), 20, True), "finished", ""),
    ("stopped by a person", Ended(RESUME_ME, 0, details(), 20, True), "cancelled", CANCELLED_REASON),
    ("died before it saw the file", Ended(137, 0, details(), 20, True), "cancelled", CANCELLED_REASON),
    ("an error to cure", Ended(2, 0, details(), 20, False), "failed", "an error that must be cured first"),
    ("scancel", Ended(RESUME_ME, 0, details("COMPLETING", ends=0), 20, False), "cancelled", "scancel"),
    ("scancel, a second later", Ended(RESUME_ME, 0, details("CANCELLED", ends=0), 20, False), "cancelled", "scancel"),
    ("scancel of a process that died", Ended(143, 0, details("COMPLETING", ends=0), 20, False), "cancelled", "scancel"),
    ("preempted", Ended(RESUME_ME, 0, details(PreemptTime=clock(-5)), 20, False), "requeued", "preempted"),
    (
        "preempted, at the end of its grace",
        Ended(137, 0, details("COMPLETING", ends=0, PreemptTime=clock(-20)), 20, False),
        "requeued",
        "preempted",
    ),
    ("told before the limit", Ended(RESUME_ME, 0, details(ends=90), 20, False), "requeued", "time limit"),
    ("at the limit", Ended(RESUME_ME, 0, details("COMPLETING", **AT_LIMIT), 20, False), "requeued", "time limit"),
    (
        "killed at the limit",
        Ended(137, 0, details("TIMEOUT", **AT_LIMIT), 20, False),
        "requeued",
        "a process died (exit code 137)",
    ),
    ("another signal", Ended(RESUME_ME, 0, details(), 20, False), "requeued", "a signal"),
    ("a dead process", Ended(137, 0, details(), 20, False), "requeued", "a process died (exit code 137)"),
    ("a limit of days", Ended(RESUME_ME, 0, details(TimeLimit="2-00:00:00"), 20, False), "requeued", "time limit"),
    ("no limit", Ended(RESUME_ME, 0, details(TimeLimit="UNLIMITED"), 20, False), "requeued", "a signal"),
    ("a silent controller", Ended(RESUME_ME, 0, {}, 20, False), "requeued", "a signal"),
    ("finished, a silent controller", Ended(0, 0, {}, 20, False), "finished", ""),
]


@pytest.mark.parametrize(("end", "state", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_end_of_a_job_decides_its_state(end: Ended, state: str, reason: str) -> None:
    after = decide(end, BEFORE, max_restarts=3)
    assert after is not None
    assert (after.state, after.reason, after.checkpoint) == (state, reason, 20)
    assert after.restarts == (1 if state == "requeued" else 0)


def test_an_end_does_not_matter_once_slurm_has_requeued_the_job() -> None:
    assert decide(Ended(137, 0, details(Restarts="1"), 20, False), BEFORE, 3) is None


def test_a_job_that_a_person_cancelled_stays_cancelled_whatever_slurm_says() -> None:
    before = State("1000", "cancelled", reason="a person asked it to stop")
    after = decide(Ended(RESUME_ME, 2, details(Restarts="2"), 20, False), before, 3)
    assert after is not None and (after.state, after.restarts, after.checkpoint) == ("cancelled", 2, 20)
    finished = decide(Ended(0, 0, details(), 20, False), before, 3)
    assert finished is not None and finished.state == "finished"


def test_restarts_without_a_checkpoint_are_bounded_and_a_checkpoint_starts_again() -> None:
    state, found = BEFORE, []
    for restarts in range(4):
        after = decide(Ended(1, restarts, details(Restarts=str(restarts)), 10, False), state, max_restarts=3)
        assert after is not None
        found.append((after.state, after.fruitless))
        state = after
    assert found == [("requeued", 1), ("requeued", 2), ("requeued", 3), ("out of restarts", 3)]
    assert "3 restarts without a new checkpoint (cluster.max_restarts)" in state.reason
    progress = replace(state, state="requeued", checkpoint=10, fruitless=3)
    after = decide(Ended(1, 4, details(Restarts="4"), 11, False), progress, max_restarts=3)
    assert after is not None and (after.state, after.fruitless, after.restarts) == ("requeued", 0, 5)


def test_no_restart_is_allowed_with_zero() -> None:
    after = decide(Ended(1, 0, details(), 10, False), BEFORE, max_restarts=0)
    assert after is not None and after.state == "out of restarts"


@pytest.mark.parametrize(
    ("owner", "taken"),
    [
        ("", False),
        ("slurm-1000.0-2", False),
        ("slurm-1000.0-3", True),
        ("slurm-1001.0-0", True),
        ("slurm-10000.0-2", True),
        ("slurm-1000.0-1", False),
        ("slurm-999.0-7", False),
        ("single", False),
    ],
)
def test_a_folder_is_taken_over_by_a_later_job_or_a_newer_start(tmp_path: Path, owner: str, taken: bool) -> None:
    if owner:
        claim(tmp_path, owner)
    assert is_taken_over(tmp_path, "1000", restarts=2) is taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


def state_of(folder: Path, job: Job) -> State:
    state = read_state(folder, job)
    assert state is not None
    return state


def test_a_job_that_should_go_on_is_requeued_with_its_state_written_first(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    add_checkpoint(folder, 30)
    assert end_job(folder, job, RESUME_ME, 0, max_restarts=3) == RESUME_ME
    assert state_of(folder, job) == State(job.id, "requeued", "a signal", 1, 0, 30, state_of(folder, job).time)
    assert (fake.job(job.id).state, fake.job(job.id).restarts) == ("PENDING", 1)


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (2, "failed")])
def test_a_job_that_should_end_is_not_requeued(folder: Path, fake: FakeSlurm, code: int, state: str) -> None:
    job = slurm_job(folder, fake)
    assert end_job(folder, job, code, 0, max_restarts=3) == code
    assert state_of(folder, job).state == state and fake.calls("scontrol")[-1][-2:] == ["job", job.id]


@pytest.mark.parametrize("name", ["stop", "stopped"])
def test_a_person_who_asked_for_a_stop_gets_it(folder: Path, fake: FakeSlurm, name: str) -> None:
    job = slurm_job(folder, fake)
    (folder / name).touch()
    end_job(folder, job, RESUME_ME, 0, max_restarts=3)
    assert state_of(folder, job).state == "cancelled" and fake.job(job.id).restarts == 0


def test_a_start_that_lost_its_folder_leaves_without_a_word_in_the_state(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake)
    before = state_of(folder, job)
    assert end_job(folder, job, TAKEN_OVER, 0, 3) == 0
    claim(folder, f"slurm-{job.id}.0-1")
    assert end_job(folder, job, 137, 0, 3) == 0
    assert state_of(folder, job) == before and fake.job(job.id).restarts == 0


def test_a_refused_requeue_is_a_failure_that_says_so(folder: Path, fake: FakeSlurm, monkeypatch: Any) -> None:
    monkeypatch.setattr("cluster.job_end._PATIENCE", 0.2)
    job = slurm_job(folder, fake)
    fake.behave(no_requeue=True)
    end_job(folder, job, 137, 0, 3)
    assert state_of(folder, job).state == "failed"
    assert state_of(folder, job).reason == "a process died (exit code 137); Slurm refused to requeue it"


def test_a_job_waits_for_a_controller_that_is_away(folder: Path, fake: FakeSlurm, monkeypatch: Any) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True)

    def back(_seconds: float) -> None:
        if len(fake.calls("scontrol")) >= 3:
            fake.behave()

    monkeypatch.setattr("cluster.job_end.time.sleep", back)
    end_job(folder, job, 137, 0, 3)
    assert len(fake.calls("scontrol")) >= 4 and fake.job(job.id).restarts == 1


@pytest.mark.parametrize(
    ("slurm", "state", "restarts"),
    [
        ("TIMEOUT", "requeued", 1),
        ("PREEMPTED", "requeued", 1),
        ("NODE_FAIL", "requeued", 1),
        ("CANCELLED", "failed", 0),
        ("FAILED", "failed", 0),
    ],
)
def test_a_job_whose_batch_script_was_killed_is_requeued_unless_a_person_did_it(
    folder: Path, fake: FakeSlurm, slurm: str, state: str, restarts: int
) -> None:
    job = slurm_job(folder, fake, slurm)
    after = requeue_dead(folder, job, State(job.id, "failed", f"Slurm's state: {slurm}"), max_restarts=3)
    assert after.state == state and state_of(folder, job).state == state
    assert fake.job(job.id).restarts == restarts


def test_a_cancelled_job_is_not_requeued_from_outside(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "TIMEOUT")
    after = requeue_dead(folder, job, State(job.id, "cancelled", "scancel"), max_restarts=3)
    assert after.state == "cancelled" and fake.job(job.id).restarts == 0


@pytest.mark.parametrize(("code", "state", "restarts"), [(0, "finished", 0), (2, "failed", 0), (137, "requeued", 1)])
def test_the_batch_script_ends_with_the_code_of_the_ranks_and_records_the_end(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, code: int, state: str, restarts: int
) -> None:
    monkeypatch.chdir(tmp_path)  # the snapshot's code runs, not that of the folder
    job = submit(settings(tmp_path, executor="slurm"), "tiny")
    fake.change(job.id, state="RUNNING")
    write_state(tmp_path / "models/tiny", State(job.id, "queued"))
    result = fake.run(job.id, exit_code=code)
    assert result.returncode == code, result.stderr
    assert state in result.stdout and state_of(tmp_path / "models/tiny", job).state == state
    assert fake.job(job.id).restarts == restarts
    assert str(ROOT) not in result.stderr


def test_a_mark_of_a_rank_counts_more_than_the_code_of_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of another start counts nothing."""
    monkeypatch.setattr(slurm, "details", lambda job: details())
    for start, state in (("1000.0-1", "requeued"), ("1000.0-0", "failed")):
        monkeypatch.setattr(slurm, "requeue", lambda job: True)
        mark_failed(tmp_path, f"slurm-{start}", "corpus.bin: empty")
        mark_failed(tmp_path, f"slurm-{start}", "rank 1: corpus.bin: empty")
        end_job(tmp_path, Job("1000", "slurm", ""), 143, restarts=0, max_restarts=3)
        recorded = read_state(tmp_path, Job("1000", "slurm", ""))
        assert recorded is not None and recorded.state == state
        assert (recorded.reason == "corpus.bin: empty") == (state == "failed")
    assert not failed_mark(tmp_path, "slurm-1000.0-0").exists()
