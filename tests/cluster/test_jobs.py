from pathlib import Path

import pytest

from cluster.jobs import Job, State, current_state, query_jobs, write_running, write_state
from cluster.slurm import SILENT, UNKNOWN, QueuedJob
from cluster.submit import find_job
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import claim, model_folder, settings, slurm_job, state_of


def seen(state: str, reason: str = "None") -> QueuedJob:
    return QueuedJob("1000", "tiny", state, reason, "node1")


@pytest.fixture
def job(folder: Path) -> Job:
    return Job("1000", "slurm", str(folder / "logs"))


@pytest.mark.parametrize(
    ("queued", "state", "reason"),
    [
        (seen("PENDING", "Resources"), "queued", "Resources"),
        (seen("RUNNING"), "running", ""),
        (seen("COMPLETING"), "running", ""),
        (seen("CANCELLED"), "cancelled", "scancel"),
        (seen("NODE_FAIL"), "failed", "NODE_FAIL"),
        (None, "failed", ""),
        (seen(UNKNOWN, SILENT), "queued", SILENT),
    ],
)
def test_a_job_stands_as_slurm_says_until_it_has_recorded_its_end(
    folder: Path, job: Job, queued: QueuedJob | None, state: str, reason: str
) -> None:
    found = current_state(folder, job, queued)
    assert found.state == state and reason in found.reason


def test_a_recorded_end_holds_until_a_person_requeues_the_job(folder: Path, job: Job) -> None:
    write_state(folder, recorded := State("1000", "out of restarts", "why", 4))
    for queued in (seen("COMPLETED"), seen("CANCELLED"), None, seen(UNKNOWN)):
        found = current_state(folder, job, queued)
        assert (found.state, found.reason, found.restarts) == (recorded.state, "why", 4)
    assert current_state(folder, job, seen("RUNNING")).state == "running"


def test_files_show_what_a_silent_controller_does_not(folder: Path, job: Job) -> None:
    claim(folder, "slurm-1000.0-0")
    assert current_state(folder, job, seen(UNKNOWN)).state == "running"
    write_state(folder, State("1000", "requeued", "time limit", restarts=1))
    assert current_state(folder, job, seen(UNKNOWN)).state == "requeued", "the claim is that of the start before"
    (folder / "stopped").touch()
    assert current_state(folder, job, seen(UNKNOWN)).state == "cancelled"
    (folder / "done.json").write_text("{}")
    assert current_state(folder, job, seen(UNKNOWN)).state == "finished"


def test_a_colleagues_job_that_slurm_hides_is_alive_unless_its_end_is_recorded(
    tmp_path: Path, folder: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = slurm_job(folder, fake, recorded=State("1000", "running"))
    fake.forget(recorded.id)
    ours = settings(tmp_path, executor="slurm")
    monkeypatch.setattr("cluster.jobs.os.getuid", lambda: folder.stat().st_uid + 1)
    for config, state in (("PrivateData = none\n", "failed"), ("PrivateData = jobs\n", "running")):
        fake.config = config
        assert current_state(folder, recorded, query_jobs([recorded]).get(recorded.id)).state == state
    assert find_job(folder, "tiny", ours) == recorded
    assert "PrivateData" in current_state(folder, recorded, query_jobs([recorded])[recorded.id]).reason
    write_state(folder, State(recorded.id, "failed"))
    assert find_job(folder, "tiny", ours) is None


def test_each_start_is_recorded_unless_a_person_has_cancelled_the_job(folder: Path, job: Job) -> None:
    write_state(folder, State("1000", "requeued", "node failure", 1, 1, checkpoint=10))
    write_running(folder, "slurm-1000.0-2")
    found = state_of(folder, job)
    assert (found.state, found.reason, found.restarts) == ("running", "", 2)
    assert (found.restarts_without_progress, found.checkpoint) == (1, 10)
    write_state(folder, State("1000", "cancelled"))
    write_running(folder, "slurm-1000.0-3")
    assert state_of(folder, job).state == "cancelled"
    write_running(folder, "local-1001")
    assert state_of(folder, Job("1001", "local", "")).state == "running", "another job's record says nothing"


def test_all_jobs_are_looked_up_with_one_call(folder: Path, tmp_path: Path, fake: FakeSlurm) -> None:
    jobs = [slurm_job(model_folder(tmp_path / str(number)), fake) for number in range(3)]
    fake.forget(jobs[1].id)
    assert set(query_jobs(jobs)) == {jobs[0].id, jobs[2].id}
    assert query_jobs([jobs[1]]) == {}, "the only id is unknown: an error of squeue, which says something about the job"
    assert len(fake.calls("squeue")) == 2
    fake.behave(silent=True)
    assert {job.state for job in query_jobs(jobs).values()} == {UNKNOWN}
