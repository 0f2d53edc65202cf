"""Trainings that Slurm interrupts: each is requeued, resumes, and ends with the parameters of an undisturbed one."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing, slurm
from tests.slurm.training_job import ITERATIONS, TrainingJob, alive, lay_out

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the final parameters of a training that nothing disturbs."""
    job = lay_out(lab, tmp_path_factory.mktemp("undisturbed"))
    job.submit()
    job.wait()
    assert job.state["state"] == "finished" and job.iteration() == ITERATIONS
    shown = lab.job(job.id)
    assert shown["JobState"] == "COMPLETED" and shown["NodeList"] == "node[1-2]" and shown["Restarts"] == "0"
    return job.digest()


def assert_resumed(job: TrainingJob, undisturbed: str) -> None:
    """It was requeued, went on from a checkpoint, and ended as if nothing had happened."""
    job.wait()
    assert job.restarts() >= 1, job.log
    assert "resumed from" in job.log
    assert job.lab.job(job.id)["JobState"] == "COMPLETED"
    assert job.state["state"] == "finished" and job.iteration() == job.iterations
    assert job.digest() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["USR2", "TERM"])
def test_a_signal_in_the_middle_saves_and_requeues(lab: Lab, tmp_path: Path, undisturbed: str, signal: str) -> None:
    job = lay_out(lab, tmp_path)
    job.submit()
    job.until_saved()
    lab.check("scancel", f"--signal={signal}", job.id)
    assert_resumed(job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["USR2", "TERM"])
@pytest.mark.parametrize("seconds", [0.3, 1, 2, 3])
def test_a_signal_during_start_up_requeues(
    lab: Lab, tmp_path: Path, undisturbed: str, signal: str, seconds: float
) -> None:
    job = lay_out(lab, tmp_path)
    job.submit()
    lab.wait_job(job.id, "RUNNING")
    time.sleep(seconds)
    lab.check("scancel", f"--signal={signal}", job.id)
    job.wait()
    assert job.restarts() >= 1 and job.digest() == undisturbed
    assert "Traceback" not in job.log, job.log


@pytest.mark.slow
def test_a_time_limit_requeues_as_often_as_needed(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path, minutes=1, iterations=300)
    job.submit()
    job.wait(timeout=580)
    assert job.restarts() >= 1 and "requeued: time limit" in job.log and "resumed from" in job.log
    assert job.iteration() == 300 and job.state["state"] == "finished"


@pytest.mark.slow
def test_scontrol_requeue_resumes(lab: Lab, tmp_path: Path, undisturbed: str) -> None:
    job = lay_out(lab, tmp_path)
    job.submit()
    job.until_saved()
    lab.check("scontrol", "requeue", job.id)
    assert_resumed(job, undisturbed)


def test_the_death_of_one_rank_requeues(lab: Lab, tmp_path: Path, undisturbed: str) -> None:
    job = lay_out(lab, tmp_path)
    job.submit()
    job.until_saved()
    ranks = job.ranks()
    ranks[3].kill()
    killed = time.monotonic()
    job.until(lambda: not any(map(alive, ranks.values())))
    assert time.monotonic() - killed < 60
    assert_resumed(job, undisturbed)


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path)
    waiting = lab.start(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    job.until_saved()
    lab.check("scancel", job.id)
    output, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 2 and "cancelled" in output.splitlines()[-1], output
    assert job.state["state"] == "cancelled" and job.restarts() == 0
    assert lab.job(job.id)["JobState"] == "CANCELLED"


def test_an_error_that_a_person_must_cure_is_quoted_and_not_retried(lab: Lab, tmp_path: Path) -> None:
    """srun ends the other ranks with a signal, and its own exit code says nothing."""
    job = lay_out(lab, tmp_path)
    (tmp_path / "dataset" / "corpus_text_document.bin").write_bytes(b"")
    result = lab.run(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    assert result.returncode == 2 and "corpus_text_document" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert job.state["state"] == "failed" and job.restarts() == 0
    assert lab.job(job.id)["JobState"] == "FAILED"


PREEMPTIONS = [(grace, mode, told) for grace in (20, 0) for mode in ("REQUEUE", "CANCEL") for told in (False, True)]


@pytest.mark.parametrize(
    "grace, mode, told", [PREEMPTIONS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in PREEMPTIONS[1:])]
)
def test_preemption_requeues(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: str, grace: int, mode: str, told: bool
) -> None:
    """By a job of a partition with a higher tier, for which it has to make room on both nodes."""
    options = {"grace_time": grace, "preempt_mode": mode, "preempt_send_user_signal": told}
    with slurm(tmp_path_factory.mktemp("lab"), **options) as site:
        job = lay_out(site, tmp_path, partition="low")
        job.submit()
        job.until_saved()
        site.check("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "srun sleep 3")
        assert_resumed(job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("kill_wait, slurmd_timeout", [(5, 15), (30, 100)])
def test_a_dead_node_is_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: str, kill_wait: int, slurmd_timeout: int
) -> None:
    with slurm(tmp_path_factory.mktemp("lab"), nodes=3, kill_wait=kill_wait, slurmd_timeout=slurmd_timeout) as lab:
        job = lay_out(lab, tmp_path)
        job.submit()
        job.until_saved()
        nodes = lab.job(job.id)["NodeList"]
        lab.kill_node("node2")
        assert_resumed(job, undisturbed)
        assert lab.job(job.id)["NodeList"] != nodes


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 60])
def test_training_goes_on_while_the_controller_is_away(
    lab: Lab, tmp_path: Path, undisturbed: str, seconds: float
) -> None:
    job = lay_out(lab, tmp_path)
    job.submit()
    job.until_saved()
    lab.wait_saved(job.id)
    waiting = lab.start(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    lab.stop_controller()
    try:
        time.sleep(seconds)
        assert waiting.poll() in (None, 0)  # it may have seen done.json
    finally:
        lab.start_controller()
    output, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, output
    assert job.digest() == undisturbed and job.state["state"] == "finished"


@pytest.mark.slow
def test_of_two_copies_of_a_job_the_newer_one_wins(lab: Lab, tmp_path: Path) -> None:
    """Slurmd alone dies: Slurm starts the job elsewhere, and the old copy goes on until it sees that."""
    whole = {"iterations": 800, "tasks_per_node": 4}
    reference = lay_out(lab, tmp_path / "reference", **whole)
    reference.submit()
    reference.wait()
    job = lay_out(lab, tmp_path / "run", **whole)
    job.submit()
    job.until_saved()
    node = lab.job(job.id)["NodeList"]
    old = job.ranks()
    lab.kill_slurmd(node)
    try:
        job.until(lambda: job.lab.job(job.id)["NodeList"] not in (node, "(null)", ""), timeout=120)
        job.until(lambda: not any(map(alive, old.values())), timeout=200)
        job.wait()
    finally:
        lab.start_node(node)
    lab.wait_idle()
    assert job.restarts() == 1 and lab.job(job.id)["JobState"] == "COMPLETED", job.log
    assert job.digest() == reference.digest() and (job.model_folder / "done.json").exists()


@pytest.mark.slow
def test_a_batch_script_of_ones_own_needs_no_submission(lab: Lab, tmp_path: Path, undisturbed: str) -> None:
    job = lay_out(lab, tmp_path)
    train = shlex.join([sys.executable, "-m", "training.train", *job.names])
    asked = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", f"--output={tmp_path}/log", f"--chdir={ROOT}"]
    lab.check("sbatch", "--wait", *asked, "--wrap", f"srun --kill-on-bad-exit=1 {train}")
    assert job.digest() == undisturbed
    shown = lab.run(*job.command("status", str(job.model_folder)), cwd=ROOT).stdout
    assert str(ITERATIONS) in shown, shown
