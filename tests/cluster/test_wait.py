import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.jobs import State, read_state, write_state
from cluster.wait import wait
from common.errors import JobError
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import make_quick, model_folder, slurm_job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_quick(monkeypatch)
    return model_folder(tmp_path)


def later(what: Callable[[], object], seconds: float = 0.5) -> None:
    threading.Timer(seconds, what).start()


def until_seen(fake: FakeSlurm, looks: int = 2) -> None:
    """Wait until a job has been looked at again: the first look may have begun before it changed."""
    before = len(fake.calls("squeue"))
    while len(fake.calls("squeue")) < before + looks:
        time.sleep(0.02)


def test_waiting_ends_with_the_job_over_its_restarts(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.progress.LOG_INTERVAL", 0)
    job = slurm_job(folder, fake, "PENDING", reason="Resources")
    beat = folder / "heartbeat" / "slurm-1000.0-0" / "rank_00000.json"
    beat.parent.mkdir(parents=True)
    beat.write_text(json.dumps({"time": 1.0, "done": 4, "loss": 7.5, "seconds_left": 90}))

    def disturb() -> None:
        until_seen(fake)
        fake.change(job.id, state="RUNNING", reason="None")
        until_seen(fake)
        write_state(folder, State(job.id, "requeued", "time limit", restarts=1))
        fake.change(job.id, state="PENDING", reason="BeginTime", restarts=1)
        until_seen(fake)
        fake.change(job.id, state="RUNNING", reason="None")
        (folder / "done.json").write_text("{}")
        write_state(folder, State(job.id, "finished", restarts=1))
        fake.change(job.id, state="COMPLETED")

    threading.Thread(target=disturb).start()
    wait("tiny", folder, job, max_restarts=3)
    printed = capsys.readouterr().out
    for part in (
        "running | iteration 4/?, loss 7.5000, 0:01:30 left\n",
        "requeued: BeginTime (restarts: 1)",
        f"tiny: done, {folder}/done.json",
    ):
        assert part in printed, printed


@pytest.mark.parametrize("state", ["failed", "out of restarts"])
def test_a_job_that_does_not_finish_is_an_error_with_the_end_of_its_log(
    folder: Path, fake: FakeSlurm, state: str
) -> None:
    job = slurm_job(folder, fake, "FAILED", State("1000", state, "why", restarts=2))
    log = Path(job.logs, f"{job.id}_0_log.out")
    log.write_text("error: no such file\n")
    with pytest.raises(JobError) as error:
        wait("tiny", folder, job, 3)
    assert str(error.value) == (f"tiny: job 1000 {state}: why (restarts: 2); log: {log}\n    error: no such file")


def test_a_cancelled_job_is_one_line_and_stays_cancelled(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "CANCELLED")
    Path(job.logs, f"{job.id}_0_log.out").write_text("iteration 4/20\n")
    with pytest.raises(JobError) as error:
        wait("tiny", folder, job, 3)
    assert str(error.value) == "tiny: job 1000 cancelled: scancel; python -m cluster.submit starts it again"
    recorded = read_state(folder, job)
    assert recorded is not None and recorded.state == "cancelled" and not fake.calls("sbatch")


def test_a_reason_that_cannot_pass_ends_the_wait_at_once(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "PENDING", reason="PartitionTimeLimit")
    started = time.monotonic()
    with pytest.raises(JobError, match="failed: Slurm would never start it: PartitionTimeLimit; "):
        wait("tiny", folder, job, 3)
    assert time.monotonic() - started < 5 and fake.job(job.id).state == "CANCELLED"
    recorded = read_state(folder, job)
    assert recorded is not None and recorded.state == "failed"


def test_a_controller_that_is_away_is_noted_once_and_ends_nothing(
    folder: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm_job(folder, fake)
    fake.behave(silent=True)

    def back() -> None:
        until_seen(fake, looks=3)
        fake.behave()
        (folder / "done.json").write_text("{}")
        write_state(folder, State(job.id, "finished"))
        fake.change(job.id, state="COMPLETED")

    threading.Thread(target=back).start()
    wait("tiny", folder, job, 3)
    assert capsys.readouterr().err.count("controller does not answer; still waiting") == 1


def test_a_state_that_becomes_visible_late_is_waited_for(
    folder: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.wait._LAG", 20)
    job = slurm_job(folder, fake, "COMPLETED")

    def appear() -> None:
        (folder / "done.json").write_text("{}")
        write_state(folder, State(job.id, "finished"))

    later(appear, 0.7)
    wait("tiny", folder, job, 3)


def test_a_job_whose_script_was_killed_at_the_time_limit_goes_on(folder: Path, fake: FakeSlurm) -> None:
    job = slurm_job(folder, fake, "TIMEOUT")

    def finish() -> None:
        while fake.job(job.id).restarts == 0:
            time.sleep(0.05)
        (folder / "done.json").write_text("{}")
        write_state(folder, State(job.id, "finished", restarts=1))
        fake.change(job.id, state="COMPLETED")

    threading.Thread(target=finish).start()
    wait("tiny", folder, job, 3)
    assert fake.job(job.id).restarts == 1
