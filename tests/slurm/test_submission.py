"""Submitting to a real Slurm: one job whatever people do, and one clear line for whatever cannot work."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from common.files import read_json
from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing, slurm
from tests.slurm.training_job import TrainingJob, lay_out

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")

SHORT = 20  # iterations


def jobs_of(job: TrainingJob) -> list[str]:
    """The ids of all jobs that Slurm knows of this training."""
    name = read_json(job.model_folder / "job.json")["name"]
    return job.lab.check("squeue", "--all", "--states=all", "--noheader", f"--name={name}", "--format=%i").split()


def hold_the_nodes(lab: Lab) -> str:
    """Fill the cluster; returns the job to cancel."""
    return lab.check(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap", "srun sleep 300", "-o/dev/null"
    ).strip()


def test_waiting_may_be_interrupted_and_taken_up_again(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path)
    waiting = lab.start(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    job.until(lambda: job.iteration() > 0)
    os.killpg(waiting.pid, signal.SIGINT)
    waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert "not submitted again" in job.wait()
    assert jobs_of(job) == [job.id]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_submitter_that_ends_inside_sbatch_leaves_one_job(lab: Lab, tmp_path: Path, number: int) -> None:
    """A slow sbatch: Slurm accepts the job after the submitter was told to go."""
    job = lay_out(lab, tmp_path, iterations=SHORT)
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\nsleep 5\nexec {shutil.which("sbatch")} "$@"\n')
    slow.chmod(0o755)
    path = f"PATH={slow.parent}:{lab.environment['PATH']}"
    submitter = lab.start("env", path, *job.command("submit", *job.names), cwd=ROOT)
    job.until((tmp_path / "called").exists)
    if number == signal.SIGINT:
        os.killpg(submitter.pid, number)  # the terminal sends it to sbatch, too
    else:
        submitter.kill()
    submitter.communicate(timeout=60)
    job.wait()
    assert jobs_of(job) == [job.id]
    assert job.iteration() == SHORT


def test_a_queued_job_runs_what_was_submitted(lab: Lab, tmp_path: Path) -> None:
    """The code and the configuration are edited while it waits."""
    code = tmp_path / "code"
    for package in ("common", "corpus", "training", "cluster"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    job = lay_out(lab, tmp_path / "run", iterations=SHORT)
    blocker = hold_the_nodes(lab)
    submitted = lab.run("env", f"PYTHONPATH={code}", *job.command("submit", *job.names), cwd=code)
    assert submitted.returncode == 0, submitted.stderr
    for path in code.rglob("*.py"):
        path.write_text("raise SystemExit('edited')\n")
    settings = yaml.safe_load(job.config.read_text())
    settings["models"]["tiny"]["train"]["iterations"] = SHORT - 10
    job.config.write_text(yaml.safe_dump(settings))
    refused = lab.run(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    assert refused.returncode == 2 and f"models.tiny.train.iterations ({SHORT}, now {SHORT - 10})" in refused.stderr
    lab.check("scancel", blocker)
    job.until((job.model_folder / "done.json").exists)
    assert read_json(job.model_folder / "done.json")["iteration"] == SHORT


@pytest.mark.slow
def test_two_trainings_share_the_nodes(lab: Lab, tmp_path: Path) -> None:
    both = [lay_out(lab, tmp_path / name, iterations=SHORT) for name in ("a", "b")]
    for job in both:
        job.submit()
    for job in both:
        job.wait()
    assert both[0].digest() == both[1].digest()


@pytest.mark.slow
def test_a_training_that_a_person_cancels_leaves_a_checkpoint_to_resume(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path, iterations=10**6)
    waiting = lab.start(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    job.until(lambda: job.iteration() > 0)
    cancelled = lab.run(*job.command("cancel", str(job.model_folder)), cwd=ROOT)
    assert cancelled.returncode == 0, cancelled.stderr
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 2 and "cancelled" in output.splitlines()[-1], output
    assert job.state["state"] == "cancelled" and job.restarts() == 0
    (saved,) = job.model_folder.glob("iter_*")
    end = int(saved.name.removeprefix("iter_")) + 2
    job.config.write_text(job.config.read_text().replace("iterations: 1000000", f"iterations: {end}"))
    job.wait()
    assert f"resumed from {saved}" in job.log and job.iteration() == end


@pytest.fixture(scope="module", params=["NO", pytest.param("ALL", marks=pytest.mark.slow)])
def strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster with limits, which are enforced at submission or not; accounts are checked."""
    if reason := missing(accounting=True):
        pytest.skip(reason)
    options = {"enforce_part_limits": request.param, "max_time": "30", "gpus": 2, "accounting": True}
    with slurm(tmp_path_factory.mktemp("strict"), **options) as running:
        yield running


@pytest.mark.parametrize(
    "cluster, minutes, words",
    [
        ({"partition": "none"}, 10, "cluster.partition"),
        ({"account": "nobody"}, 10, "cluster.account"),
        ({}, 60, "time_limit_minutes"),
        ({"gpus_per_node": 4}, 10, "GPUs"),
        ({"mem_gb_per_task": 10**6}, 10, "memory"),
    ],
    ids=["partition", "account", "time", "gpus", "memory"],
)
def test_what_the_site_does_not_have_is_one_line_at_once(
    strict: Lab, tmp_path: Path, cluster: dict[str, object], minutes: int, words: str
) -> None:
    job = lay_out(strict, tmp_path, minutes=minutes, account="lab")
    settings = yaml.safe_load(job.config.read_text())
    settings["cluster"].update(cluster)
    job.config.write_text(yaml.safe_dump(settings))
    job.model_folder.mkdir(parents=True)
    (job.model_folder / "done.json").write_text("{}")
    began = time.monotonic()
    result = strict.run(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
    assert result.returncode == 2 and time.monotonic() - began < 30
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and words.lower() in lines[0].lower(), result.stderr
    assert strict.check("squeue", "--noheader") == ""


def test_a_model_folder_that_cannot_be_written_is_one_line(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path)
    lab.check("mount", "--bind", str(tmp_path), str(tmp_path))
    lab.check("mount", "-o", "remount,ro,bind", str(tmp_path))
    try:
        result = lab.run(*job.command("submit", *job.names), cwd=ROOT)
    finally:
        lab.check("umount", str(tmp_path))
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert str(job.folder) in line and "ead-only" in line


@pytest.mark.slow
def test_a_full_disk_is_named_and_not_retried(lab: Lab, tmp_path: Path) -> None:
    job = lay_out(lab, tmp_path)
    job.model_folder.mkdir(parents=True)
    lab.check("mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(job.model_folder))
    try:
        result = lab.run(*job.command("submit", *job.names, "--wait"), cwd=ROOT)
        assert result.returncode == 2, result.stdout
        assert "o space left" in result.stderr or "disk" in result.stderr, result.stderr
        assert lab.check("squeue", "--noheader") == ""
    finally:
        lab.check("umount", str(job.model_folder))
