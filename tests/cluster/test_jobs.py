import threading
from pathlib import Path

import pytest

from cluster.jobs import SILENT, Job, State, current_state, log_path, log_tail, look, read_job, read_state, write_state
from cluster.slurm import QueuedJob
from common.errors import InputError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import claim, model_folder, slurm_job


def seen(state: str, reason: str = "None") -> dict[str, QueuedJob]:
    return {"1000": QueuedJob("1000", "tiny", state, reason, "node1")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = model_folder(tmp_path)
    (made / "logs").mkdir()
    return made


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
        ({}, "failed", ""),
        (None, "queued", SILENT),
    ],
)
def test_a_job_stands_as_slurm_says_until_it_has_recorded_its_end(
    folder: Path, job: Job, queued: dict[str, QueuedJob] | None, state: str, reason: str
) -> None:
    found = current_state(folder, job, queued)
    assert found.state == state and reason in found.reason


def test_a_recorded_end_holds_until_a_person_requeues_the_job(folder: Path, job: Job) -> None:
    write_state(folder, recorded := State("1000", "out of restarts", "why", 4))
    for queued in (seen("COMPLETED"), seen("CANCELLED"), {}, None):
        found = current_state(folder, job, queued)
        assert (found.state, found.reason, found.restarts) == (recorded.state, "why", 4)
    assert current_state(folder, job, seen("RUNNING")).state == "running"


@pytest.mark.parametrize("earlier", ["state", "claim", "log"])
def test_a_job_that_waits_after_it_has_started_is_requeued(folder: Path, job: Job, earlier: str) -> None:
    if earlier == "state":
        write_state(folder, State("1000", "requeued", "time limit", restarts=1))
    elif earlier == "claim":
        claim(folder, "slurm-1000.0-0")
    else:
        log_path(job).touch()
    assert current_state(folder, job, seen("PENDING", "BeginTime")).state == "requeued"


def test_restarts_that_slurm_made_itself_count(folder: Path, job: Job) -> None:
    claim(folder, "slurm-1000.0-2")
    assert current_state(folder, job, seen("RUNNING")).restarts == 2
    claim(folder, "slurm-999.0-3")
    assert current_state(folder, job, seen("RUNNING")).restarts == 0


def test_files_show_what_a_silent_controller_does_not(folder: Path, job: Job) -> None:
    claim(folder, "slurm-1000.0-0")
    assert current_state(folder, job, None).state == "running"
    write_state(folder, State("1000", "requeued", "time limit", restarts=1))
    assert current_state(folder, job, None).state == "requeued", "the claim is that of the start before"
    (folder / "stopped").touch()
    assert current_state(folder, job, None).state == "cancelled"
    (folder / "done.json").write_text("{}")
    assert current_state(folder, job, None).state == "finished"


def test_all_jobs_are_looked_up_with_one_call(folder: Path, tmp_path: Path, fake: FakeSlurm) -> None:
    jobs = [slurm_job(model_folder(tmp_path / str(number)), fake) for number in range(3)]
    fake.forget(jobs[1].id)
    assert set(look(jobs) or {}) == {jobs[0].id, jobs[2].id}
    assert look([jobs[1]]) == {}, "the only id is unknown: an error of squeue, which says something about the job"
    assert len(fake.calls("squeue")) == 2
    fake.behave(silent=True)
    assert look(jobs) is None


def test_only_a_whole_record_of_this_job_counts(folder: Path, job: Job) -> None:
    write_state(folder, State("999", "failed"))
    assert read_state(folder, job) is None
    (folder / "state.json").write_text('{"job": "1000"')
    assert read_state(folder, job) is None
    (folder / "job.json").write_text('{"number": 3}')
    with pytest.raises(InputError, match=r"job\.json"):
        read_job(folder)


def test_the_end_of_a_log_leaves_out_what_srun_and_submitit_say(job: Job) -> None:
    assert log_tail(job) == (None, [])
    noise = "srun: error: node1: task 0: Killed\nslurmstepd: error: x\nsubmitit WARNING y\n"
    log_path(job).write_text(f"first\nlast\n{noise}")
    assert log_tail(job, 1) == (log_path(job), ["last"])


def test_two_that_write_a_state_at_once_wait_for_each_other(folder: Path) -> None:
    def write(name: str) -> None:
        for restarts in range(30):
            write_state(folder, State(name, "running", restarts=restarts))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("1000", "1001")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # an exception in one is a warning, and so a failure
    assert '"restarts":29' in (folder / "state.json").read_text().replace(" ", "")
