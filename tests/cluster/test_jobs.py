import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.jobs import SILENT, Job, State, current_state, log_path, log_tail, look, read_job, read_state, write_state
from cluster.slurm import QueuedJob
from common.errors import InputError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import claim, model_folder, slurm_job

JOB = Job("1000", "slurm", "")


def seen(state: str, reason: str = "None") -> dict[str, QueuedJob]:
    return {"1000": QueuedJob("1000", "tiny", state, reason, "node1")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def job_in(folder: Path) -> Job:
    (folder / "logs").mkdir()
    return Job("1000", "slurm", str(folder / "logs"))


@pytest.mark.parametrize(
    ("queued", "state", "reason"),
    [
        (seen("PENDING", "Resources"), "queued", "Resources"),
        (seen("RUNNING"), "running", ""),
        (seen("COMPLETING"), "running", ""),
        (seen("CANCELLED"), "cancelled", "scancel"),
        (seen("NODE_FAIL"), "failed", "Slurm's state: NODE_FAIL"),
        ({}, "failed", "it ended without a word; its log may say why"),
        (None, "queued", SILENT),
    ],
)
def test_a_job_stands_as_slurm_says_until_it_has_recorded_its_end(
    folder: Path, queued: dict[str, QueuedJob] | None, state: str, reason: str
) -> None:
    job = job_in(folder)
    found = current_state(folder, job, queued)
    assert (found.state, found.reason) == (state, reason)


@pytest.mark.parametrize("queued", [seen("COMPLETED"), seen("CANCELLED"), {}, None])
def test_a_recorded_end_holds_whether_or_not_slurm_remembers_the_job(
    folder: Path, queued: dict[str, QueuedJob] | None
) -> None:
    job, recorded = job_in(folder), State("1000", "out of restarts", "3 restarts without a new checkpoint", 4)
    write_state(folder, recorded)
    found = current_state(folder, job, queued)
    assert (found.state, found.reason, found.restarts) == (recorded.state, recorded.reason, 4)


def test_a_job_that_a_person_requeues_after_its_end_runs_again(folder: Path) -> None:
    job = job_in(folder)
    write_state(folder, State("1000", "failed", "an error that must be cured first"))
    assert current_state(folder, job, seen("RUNNING")).state == "running"


def _start_log(folder: Path) -> None:
    (folder / "logs" / "1000_0_log.out").touch()


@pytest.mark.parametrize(
    "earlier",
    [
        lambda folder: write_state(folder, State("1000", "requeued", "time limit", restarts=1)),
        lambda folder: claim(folder, "slurm-1000.0-0"),
        _start_log,
    ],
    ids=["it was requeued by its script", "it still has its claim", "it has a log"],
)
def test_a_job_that_waits_after_it_has_started_is_requeued(folder: Path, earlier: Callable[[Path], None]) -> None:
    job = job_in(folder)
    earlier(folder)
    assert current_state(folder, job, seen("PENDING", "BeginTime")).state == "requeued"


def test_restarts_that_slurm_made_itself_count(folder: Path) -> None:
    job = job_in(folder)
    claim(folder, "slurm-1000.0-2")
    assert current_state(folder, job, seen("RUNNING")).restarts == 2
    claim(folder, "slurm-999.0-3")
    assert current_state(folder, job, seen("RUNNING")).restarts == 0


def test_files_show_what_a_silent_controller_does_not(folder: Path) -> None:
    job = job_in(folder)
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
    assert set(look(jobs) or {}) == {job.id for job in jobs}
    fake.forget(jobs[1].id)
    assert set(look(jobs) or {}) == {jobs[0].id, jobs[2].id}
    assert look([jobs[1]]) == {}, "the only id is unknown: an error of squeue, which says something about the job"
    assert len(fake.calls("squeue")) == 3
    fake.behave(silent=True)
    assert look(jobs) is None


def test_another_jobs_state_says_nothing(folder: Path) -> None:
    write_state(folder, State("999", "failed"))
    assert read_state(folder, JOB) is None
    (folder / "state.json").write_text('{"job": "1000"')
    assert read_state(folder, JOB) is None


def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"number": 3}')
    with pytest.raises(InputError, match=r"job\.json: not a job record"):
        read_job(tmp_path)


def test_the_end_of_a_log_leaves_out_what_srun_and_submitit_say(folder: Path) -> None:
    job = job_in(folder)
    assert log_tail(job) == (None, [])
    noise = "srun: error: node1: task 0: Killed\nslurmstepd: error: x\nsubmitit WARNING y\n"
    log_path(job).write_text(f"first\nlast\n{noise}")
    assert log_tail(job, 1) == (log_path(job), ["last"])


def test_two_that_write_a_state_at_once_wait_for_each_other(folder: Path) -> None:
    def write(name: str) -> None:
        for restarts in range(30):
            write_state(folder, State(name, "running", restarts=restarts))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("1000", "1001")]
    with pytest.MonkeyPatch.context() as patch:
        failed: list[object] = []
        patch.setattr(threading, "excepthook", failed.append)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
