"""Submitting to a real Slurm: one job, whatever happens to the submitter, and it runs what was submitted."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from common.files import read_json
from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing
from tests.slurm.test_training import Training
from tests.training.helpers import make_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_submitter_that_ends_inside_sbatch_leaves_one_job(lab: Lab, tmp_path: Path, number: int) -> None:
    """A slow sbatch: Slurm accepts the job after the submitter was told to go. The code is edited while it waits."""
    code = tmp_path / "code"
    for package in ("common", "corpus", "training", "cluster"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    training = Training(lab, make_run(tmp_path / "run", parallel={"tensor": 2}))
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\nsleep 3\nexec {shutil.which("sbatch")} "$@"\n')
    slow.chmod(0o755)
    blocker = lab.check(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap", "sleep 300"
    ).strip()
    settings = [f"PATH={slow.parent}:{lab.environment['PATH']}", f"PYTHONPATH={code}"]
    submitter = lab.start("env", *settings, *training.submit, cwd=code)
    lab.wait((tmp_path / "called").exists)
    if number == signal.SIGINT:
        os.killpg(submitter.pid, number)  # the terminal sends it to sbatch, too
    else:
        submitter.kill()
    submitter.communicate(timeout=60)
    training.run(*training.submit)
    for path in code.rglob("*.py"):
        path.write_text("raise SystemExit('edited')\n")
    lab.check("scancel", blocker)
    training.run(*training.submit, "--wait")
    name = read_json(training.model / "job.json")["name"]
    known = lab.check("squeue", "--all", "--states=all", "--noheader", f"--name={name}", "--format=%i").split()
    assert known == [training.id] and training.state["state"] == "finished"
